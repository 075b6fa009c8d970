"""The words of the command line: what each verb takes, and how it says that something is wrong with them."""

import argparse

from piebridge import __version__
from piebridge.core.errors import UserError
from piebridge.core.names import closest
from piebridge.help_texts import EXAMPLES

DESCRIPTION = "Fine-tune a pretrained network on the device that owns the data, and get the original back, tuned."


def parse_arguments(argv, verbs):
    """Arguments of the verb in `argv`. verbs: {verb: (its action, a summary)}. UserError, in one line, for anything that is wrong."""
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb is not None and verb not in verbs:
        raise UserError(f"unknown verb '{verb}'{closest(verb, verbs)}; the verbs are {', '.join(verbs)}")
    arguments, rest = _build_parser(verbs).parse_known_args(argv)
    usage = f"see `{'piebridge ' + verb if verb else 'piebridge'} --help`"
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        hint = f"write settings as key=value, such as {unknown[0].lstrip('-')}=...; " if verb in ("train", "plan", "data") else ""
        raise UserError(f"unknown option {unknown[0]}; {hint}{usage}")
    if rest and not hasattr(arguments, "words"):
        raise UserError(f"unexpected word '{rest[0]}'; {usage}")
    if rest:  # words that came after an option
        arguments.words = list(arguments.words) + rest
    return arguments


class _Parser(argparse.ArgumentParser):
    """argparse with the project's manners: an error is one line, and every help keeps its examples as written."""

    def __init__(self, **options):
        super().__init__(formatter_class=_wide_formatter, **options)

    def error(self, message):
        raise UserError(f"{message}; see `{self.prog} --help`")


def _wide_formatter(prog):
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=110)


def _build_parser(verbs):
    """The parser of all verbs. Each verb takes options and words in any order."""
    parser = _Parser(prog="piebridge", description=DESCRIPTION, epilog=EXAMPLES[""])
    parser.add_argument("--version", action="version", version=f"piebridge {__version__}")
    _add_verbosity(parser, 0)
    # a verb's own -v must not reset one given before the verb, hence SUPPRESS below
    places = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    parsers = {}
    for name, (action, summary) in verbs.items():
        sentence = summary[0].upper() + summary[1:] + "."
        parsers[name] = places.add_parser(name, help=summary, description=sentence, epilog=EXAMPLES[name])
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
    parsers["plan"].add_argument("run", metavar="RUN", help=runs)
    words("plan", "key=value", "change a key of the configuration")
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
    actions = ("show", "search", "compile", "bench")
    parsers["engine"].add_argument("action", choices=actions, metavar="|".join(actions))
    parsers["engine"].add_argument("--memory", metavar="SIZE", help="with search: most that training may take on top of a forward pass")
    parsers["engine"].add_argument("--latency", type=float, metavar="MS", help="with search: most milliseconds that a step may take")
    parsers["engine"].add_argument("--out", metavar="FILE", help="the program (compile), the scheme (search), or a PNG (show)")
    parsers["engine"].add_argument("--json", action="store_true", help="with bench: print JSON")
    words("engine", "NETWORK key=value", "known networks or network files; settings, see below")
    parsers["configs"].add_argument("action", nargs="?", default="ls", choices=("ls", "show", "keys"), metavar="ls|show|keys")
    parsers["configs"].add_argument("run", nargs="?", metavar="RUN", help="for show: the run")
    words("configs", "key=value", "for show: change a key first")
    parsers["doctor"].add_argument("--json", action="store_true", help="print JSON")
