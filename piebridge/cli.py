"""The command line: verbs only. Each verb parses, calls the part that does the work, and prints what it returns.

Nothing heavy is imported before a verb needs it: `piebridge --help` answers at once, without torch.
"""

import argparse
import csv
import logging
import sys

from piebridge import __version__
from piebridge.console import configure_logging, exit_status
from piebridge.core.errors import UserError
from piebridge.core.files import expand_user
from piebridge.core.names import closest
from piebridge.help_texts import EXAMPLES

LOG = logging.getLogger(__name__)
DESCRIPTION = "Fine-tune a pretrained network on the device that owns the data, and get the original back, tuned."


def train(arguments):
    from piebridge.config import load_config, parse_overrides
    from piebridge.run_paths import find_config

    load_config(find_config(arguments.run), arguments.words)  # what is wrong with it is said before torch is imported
    from piebridge.training import train as run

    result = run(arguments.run, **parse_overrides(arguments.words))
    accuracy = result.results["test_accuracy"]
    print(f"{result.method} on {result.dataset}: test accuracy {'n/a' if accuracy is None else f'{100 * accuracy:.2f} %'}, "
          f"{result.results['train_seconds']:.1f} s of training ({result.results['wall_seconds']:.1f} s in all)\n"
          f"run folder     {result.folder}\n"
          f"tuned network  {result.folder / 'tuned.safetensors'}")


def predict(arguments):
    from piebridge.core.prediction import predict as classify
    from piebridge.run_paths import find_run_folder

    if not arguments.words:
        raise UserError(f"predict {arguments.run}: name at least one image or folder of images")
    if arguments.top < 1:
        raise UserError(f"--top {arguments.top}: a number of classes, at least 1")
    if hasattr(sys.stdout, "reconfigure"):  # since Python 3.7; a file's name may be no text at all, and goes out as it is
        sys.stdout.reconfigure(errors="surrogateescape")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["path", "class", "probability"])
    for row in classify(find_run_folder(arguments.run), arguments.words, arguments.top):
        writer.writerow([row.path, row.class_name, f"{row.probability:.4f}"])


def table(arguments):
    if arguments.document:
        from piebridge.report.results_document import update_document

        if arguments.words or arguments.markdown:
            raise UserError("--document FILE: the document names the folders itself; leave out RES_DIR, output= and --markdown")
        print(update_document(expand_user(arguments.document)))
        return
    from piebridge.report.results import collect
    from piebridge.report.table import build_rows, render_markdown, render_text, write_csv

    folder, output = _folder_and_output(arguments.words, "table.csv")
    runs = collect(folder)
    rows = build_rows(runs)
    print((render_markdown if arguments.markdown else render_text)(rows, runs))
    write_csv(rows, output)
    LOG.info("written: %s", output)


def compare(arguments):
    from piebridge.compare_verb import run

    form = "json" if arguments.json else "csv" if arguments.csv else "text"
    print(run(_existing(expand_user(arguments.res_dir)), expand_user(arguments.expected), arguments.tolerance, form))


def plot(arguments):
    from piebridge.report.plot import draw
    from piebridge.report.results import collect

    folder, output = _folder_and_output(arguments.words, "plot.png")
    print(draw(collect(folder), output))


def data(arguments):
    from piebridge.config_values import split_words
    from piebridge.core import data_catalogue

    if not arguments.name:
        print("\n".join(data_catalogue.describe()))
        return
    options = split_words(arguments.words)
    unknown = [key for key in options if key not in ("source", "output")]
    if unknown:
        raise UserError(f"{unknown[0]}={options[unknown[0]]}: unknown option{closest(unknown[0], ('source', 'output'))}; "
                        "known are source and output")
    print(data_catalogue.prepare(arguments.name, **options))


def forge(arguments):
    from piebridge.forge_verb import run

    print(run(arguments))


def configs(arguments):
    from piebridge.config_listing import describe_runs, describe_settings, show

    words = [arguments.run] + arguments.words if arguments.run else arguments.words
    if arguments.action == "show":
        if not words:
            raise UserError("configs show: name a run, for example: piebridge configs show efficientnet_lite0/Clipart10/ours")
        print(show(words[0], words[1:]), end="")
        return
    if words:
        raise UserError(f"configs {arguments.action}: takes no further words (got '{words[0]}')")
    print("\n".join(describe_runs() if arguments.action == "ls" else describe_settings()))


def doctor(arguments):
    from piebridge.core.doctor import examine, render

    report = examine()
    if arguments.json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print(render(report))


VERBS = {
    "train": (train, "train one run, and save the tuned network"),
    "predict": (predict, "classify images with a run's tuned network"),
    "table": (table, "compare finished runs: accuracy, seconds, ratios, memory"),
    "compare": (compare, "set finished runs beside expected or published results"),
    "plot": (plot, "draw accuracy against training seconds"),
    "data": (data, "list, fetch or build data sets"),
    "forge": (forge, "make a proxy set from a network and unlabelled images; show or profile one"),
    "configs": (configs, "list runs, show a run's configuration, explain the keys"),
    "doctor": (doctor, "say what this machine has, and what is missing"),
}


class _Parser(argparse.ArgumentParser):
    """argparse with the project's manners: an error is one line, and every help keeps its examples as written."""

    def __init__(self, **options):
        super().__init__(formatter_class=_wide_formatter, **options)

    def error(self, message):
        raise UserError(f"{message}; see `{self.prog} --help`")


def _wide_formatter(prog):
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=110)


def build_parser():
    """The parser of all verbs. Each verb takes options and words in any order."""
    parser = _Parser(prog="piebridge", description=DESCRIPTION, epilog=EXAMPLES[""])
    parser.add_argument("--version", action="version", version=f"piebridge {__version__}")
    _add_verbosity(parser, 0)
    # a verb's own -v must not reset one given before the verb, hence SUPPRESS below
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    parsers = {}
    for name, (action, summary) in VERBS.items():
        sentence = summary[0].upper() + summary[1:] + "."
        parsers[name] = verbs.add_parser(name, help=summary, description=sentence, epilog=EXAMPLES[name])
        parsers[name].set_defaults(action_of_verb=action)
        _add_verbosity(parsers[name], argparse.SUPPRESS)
    _add_words(parsers)
    return parser


def _add_verbosity(parser, default):
    parser.add_argument("-v", dest="more", action="count", default=default, help="log details on stderr")
    parser.add_argument("-q", dest="less", action="count", default=default, help="log warnings only, no progress bars")


def _add_words(parsers):
    def words(name, metavar, text):
        parsers[name].add_argument("words", nargs="*", default=[], metavar=metavar, help=text)

    runs = "a path below res/train_log, a folder with a config.yaml, or a YAML file"
    parsers["train"].add_argument("run", metavar="RUN", help=runs)
    words("train", "key=value", "change a key of the configuration")
    parsers["predict"].add_argument("run", metavar="RUN", help="a run, or its folder")
    words("predict", "IMAGE_OR_FOLDER", "what to classify; folders are searched through")
    top = "rows per image, most probable first (default 1)"
    parsers["predict"].add_argument("--top", type=int, default=1, metavar="N", help=top)
    parsers["table"].add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parsers["table"].add_argument("--document", metavar="FILE", help="write the tables that are marked in a Markdown file anew")
    words("table", "RES_DIR output=FILE", "where to look for runs (default res), where to write the CSV")
    parsers["compare"].add_argument("res_dir", metavar="RES_DIR", help="where to look for runs")
    parsers["compare"].add_argument("expected", metavar="EXPECTED", help="a CSV file of expected results, or a folder of such files")
    parsers["compare"].add_argument("--tolerance", type=float, metavar="POINTS",
                                    help="of test accuracy, in percentage points (default: as EXPECTED states, or 2)")
    formats = parsers["compare"].add_mutually_exclusive_group()
    formats.add_argument("--csv", action="store_true", help="print CSV")
    formats.add_argument("--json", action="store_true", help="print JSON")
    words("plot", "RES_DIR output=FILE", "where to look for runs (default res), where to write the PNG")
    parsers["data"].add_argument("name", nargs="?", metavar="NAME", help="the data set; without it, all are listed")
    words("data", "key=value", "source=DIR|FILE to build from, output=DIR to build into")
    parsers["forge"].add_argument("network", metavar="NETWORK|SET", help="a known network or a network file; or a proxy set")
    parsers["forge"].add_argument("--images", metavar="DIR", help="unlabelled images, searched through with its sub-folders")
    parsers["forge"].add_argument("--out", metavar="SET", help="folder of the new set, such as proxynetworks/NAME")
    parsers["forge"].add_argument("--show", action="store_true", help="print the structure of a network, or what a set holds")
    parsers["forge"].add_argument("--profile", action="store_true", help="measure a set on this device, into its manifest")
    parsers["forge"].add_argument("--size", type=int, metavar="PIXELS", help="with --show: of the images (default: the network's own)")
    words("forge", "key=value", "change a setting, see below")
    parsers["configs"].add_argument("action", nargs="?", default="ls", choices=("ls", "show", "keys"), metavar="ls|show|keys")
    parsers["configs"].add_argument("run", nargs="?", metavar="RUN", help="for show: the run")
    words("configs", "key=value", "for show: change a key first")
    parsers["doctor"].add_argument("--json", action="store_true", help="print JSON")


def parse(argv):
    """Arguments of the verb in `argv`. Raises UserError, in one line, for anything that is wrong with them."""
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        raise UserError(f"unknown verb '{verb}'{closest(verb, VERBS)}; the verbs are {', '.join(VERBS)}")
    arguments, rest = build_parser().parse_known_args(argv)
    usage = f"see `{'piebridge ' + verb if verb else 'piebridge'} --help`"
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        hint = f"write settings as key=value, such as {unknown[0].lstrip('-')}=...; " if verb in ("train", "data") else ""
        raise UserError(f"unknown option {unknown[0]}; {hint}{usage}")
    if rest and not hasattr(arguments, "words"):
        raise UserError(f"unexpected word '{rest[0]}'; {usage}")
    if rest:  # words that came after an option
        arguments.words = list(arguments.words) + rest
    return arguments


def _folder_and_output(words, name):
    """`[RES_DIR] [output=FILE]` -> (folder that exists, file to write)."""

    from piebridge.run_paths import results_folder

    folder, output = None, None
    for word in words:
        if word.startswith("output="):
            output = expand_user(word[len("output="):])
        elif folder is None:
            folder = expand_user(word)
        else:
            raise UserError(f"'{word}': one folder at a time ('{folder}' is given already)")
    folder = _existing(folder or results_folder())
    return folder, output or folder / name


def _existing(folder):
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name one that holds run folders, such as res")
    return folder


def main(argv=None):
    """Run one command and return its exit status: 0, 1 failed, 2 bad usage or input, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else list(argv)

    def action():
        arguments = parse(argv)
        if arguments.verb is None:
            raise UserError("name a verb: " + ", ".join(VERBS) + "; see `piebridge --help`")
        configure_logging(arguments.more - arguments.less)
        arguments.action_of_verb(arguments)

    return exit_status(action)


if __name__ == "__main__":
    sys.exit(main())
