"""The tables of a document, from records: what lies between two marks is made anew, and nothing in it is typed by hand.

    <!-- records: ../res/measured/x86_2_cores/Openclipart ../res/measured/x86_2_cores/Clipart10 -->
    ...
    <!-- end of records -->

The first mark names folders of finished runs, relative to the document, as links are; a name with spaces is put in quotes. Without any
folder the table says that nothing has been measured. With `records by folder:` rows are named by the folders that hold their seeds, and may
differ in more than the method.
"""

import os
import re
import shlex
from pathlib import Path

from piebridge.core.errors import UserError
from piebridge.core.files import write_text
from piebridge.report.results import collect, left_out
from piebridge.report.table import DOCUMENT_COLUMNS, build_rows, render_markdown

MARKS = re.compile(r"^<!-- records( by folder)?:(.*?)-->\n.*?^<!-- end of records -->$", re.DOTALL | re.MULTILINE)
NOTHING = "Not measured yet."


def update_document(path):
    """Write every marked table of a Markdown file anew; returns its path. UserError: no file, no marks, records that do not count."""
    path = Path(str(path))
    text = _read(path)
    rendered = render_document(text, path)
    if rendered != text:
        write_text(path, rendered)
    return path


def render_document(text, path):
    """The text of the document at `path` with its tables as the records have them."""
    starts = len(re.findall("^<!-- records(?: by folder)?:", text, re.MULTILINE))
    if not starts:
        raise UserError(f"{path}: has no table to write; mark its place with a line `<!-- records: FOLDER ... -->` and a line "
                        "`<!-- end of records -->`")
    if len(MARKS.findall(text)) != starts:
        raise UserError(f"{path}: a line `<!-- records: FOLDER ... -->` lacks its line `<!-- end of records -->`")
    return MARKS.sub(lambda match: _table(match.group(1) or "", match.group(2), path), text)


def _table(kind, words, path):
    """Both marks and what belongs between them. kind, words: of the first mark."""
    try:
        folders = shlex.split(words)
    except ValueError:
        raise UserError(f"{path}: records:{words.rstrip()}: a quote is not closed") from None
    table = render_records([Path(os.path.normpath(str(path.parent / folder))) for folder in folders], bool(kind))
    return f"<!-- records{kind}:{words}-->\n{table}\n<!-- end of records -->"


def render_records(folders, is_by_folder=False):
    """The Markdown table of all runs below the folders. UserError for a run that does not count: records are kept of finished runs."""
    runs = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder of records")
        runs.update({run.folder.resolve(): run for run in collect(folder)})
    skipped = left_out(list(runs.values()))
    if skipped:
        raise UserError(f"{skipped[0]}; a document shows finished runs: finish it, or move it away")
    columns = DOCUMENT_COLUMNS[:1] + ("epochs",) + DOCUMENT_COLUMNS[1:] if is_by_folder else DOCUMENT_COLUMNS
    return render_markdown(build_rows(list(runs.values()), is_by_folder), list(runs.values()), columns) if runs else NOTHING


def _read(path):
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
