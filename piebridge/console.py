"""The terminal's side of a command: log lines on stderr, errors in one line, exit statuses."""

import logging
import os
import sys
import traceback

from piebridge.core.errors import Cancelled, RunFailed, UserError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it


class _LineHandler(logging.Handler):
    """Writes a record on stderr without tearing a progress bar apart."""

    def emit(self, record):
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {line}"
        if "tqdm" in sys.modules:
            sys.modules["tqdm"].tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(line + "\n")


def configure_logging(verbosity):
    """Send the package's log to stderr. `verbosity`: below 0 warnings only and no progress bars, 0 progress, above 0 details."""
    logger = logging.getLogger("piebridge")
    logger.handlers[:] = [_LineHandler()]
    logger.setLevel(logging.WARNING if verbosity < 0 else logging.INFO if verbosity == 0 else logging.DEBUG)


def exit_status(action):
    """Run `action()` and return the exit status it stands for; every exception becomes one line a problem on stderr."""
    try:
        action()
        sys.stdout.flush()
        return EXIT_OK
    except SystemExit as stop:  # how argparse ends after --help and --version
        return stop.code or EXIT_OK
    except BrokenPipeError:
        # The reader (`| head`) has gone: say nothing, and keep the interpreter's own last flush from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, Cancelled) as error:
        return _report(error, str(error) or "interrupted", EXIT_INTERRUPTED)
    except UserError as error:
        return _report(error, str(error), EXIT_USAGE)
    except RunFailed as error:
        return _report(error, str(error), EXIT_FAILED)
    except ImportError as error:
        return _report(error, *_import_failure(error))
    except OSError as error:
        return _report(error, f"{error.filename}: {error.strerror}" if error.filename else str(error), EXIT_FAILED)
    except Exception as error:
        text = " ".join(str(error).split())
        hint = "PIEBRIDGE_DEBUG=1 shows where"
        return _report(error, f"unexpected {type(error).__name__}: {text} ({hint}; please report it)", EXIT_FAILED)


def _report(error, text, status):
    if os.environ.get("PIEBRIDGE_DEBUG", "") not in ("", "0"):
        traceback.print_exception(type(error), error, error.__traceback__)
    for line in text.splitlines():
        sys.stderr.write(f"piebridge: {line}\n")
    return status


def _import_failure(error):
    """(text, exit status): what is missing is for the user to install; what breaks is a failure."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "torchvision"):
        return (f"{error.name} is not installed: pip install torch torchvision (on a Jetson NVIDIA's build, see "
                "requirements/README.md)", EXIT_USAGE)
    if isinstance(error, ModuleNotFoundError) and (error.name or "piebridge").partition(".")[0] != "piebridge":
        return f"the Python package that provides '{error.name}' is not installed; `piebridge doctor` lists what is", EXIT_USAGE
    return f"{error} (PIEBRIDGE_DEBUG=1 shows where)", EXIT_FAILED
