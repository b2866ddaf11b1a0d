"""Builds the site from the pages where they are: mkdocs.yml names this file.

Every page keeps its path in the repository, so that links between pages work here as on a code
host. Files that pages link to become pages of their own, with an anchor for each line (#L12); .csv
files become tables. The explorer, the flags and the complete proof are made here, not kept in git.
"""

import contextlib
import csv
import functools
import html
import io
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from recipes.common.entries import ENTRIES
from recipes.common.runtime import start

ROOT = pathlib.Path(__file__).parents[2]
HOME = "recipes/docs/start.md"
PROOF = "tests/PROOF.md"
TABLES = "recipes/instruments/results/tables"  # index.csv says what each table is
EXPLORER_MARK = "<!-- the explorer -->"
EXPLORER_FRAME = (
    '<iframe src="explorer.html" title="The explorer" loading="lazy" '
    'style="width: 100%; height: 50rem; border: 1px solid #8888"></iframe>'
)
COPIED = {".md", ".ipynb", ".svg", ".webp", ".png", ".css", ".js"}
REFERENCE = {  # page → what it documents, from docstrings
    "reference/models.md": [f"zoo.{name}" for name in ENTRIES],
    "reference/zoo.md": [
        "zoo.core.sharding",
        "zoo.core.strategies",
        "zoo.core.decoder",
        "zoo.core.config",
        "zoo.core.layers",
    ],
    "reference/recipes.md": [
        "recipes.common.mesh.make_mesh",
        "recipes.common.checkpoint.restore",
        "recipes.common.report.describe.describe",
        "recipes.common.report.hlo.collectives",
        "recipes.common.sharding.layout.make_layout",
        "recipes.common.sharding.layout.Layout",
        "recipes.common.train.step.TrainStep",
        "data.batches.Dataset",
    ],
}
COMMANDS = {"hf": [["import"], ["export"]]}  # commands that need a word
TITLES = {"models": "Models", "zoo": "Parts of models", "recipes": "Functions of recipes"}
SOURCE_PAGE = "---\nsearch:\n  exclude: true\n---\n\n# {}\n"
SOURCES: dict[str, str] = {}  # page → the text of its file, in HTML
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files: Files, config) -> Files:
    """Returns all files of the site: pages and pictures, source pages, the explorer."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    site = [file for file in files if file.src_uri.startswith("assets/")]  # the theme's
    pages = "".join((ROOT / path).read_text() for path in tracked if path.endswith(".md"))
    for path in tracked:
        if "golden/" in path and f"{path.removeprefix('tests/')})" not in pages:
            continue
        if pathlib.Path(path).suffix in COPIED:
            site.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
        elif path.endswith(".csv"):
            site.append(File.generated(config, f"{path}.md", content=table_page(path)))
        elif source := highlighted(path):
            page = File.generated(config, f"{path}.md", content=SOURCE_PAGE.format(path))
            SOURCES[page.src_uri] = source
            page.dest_uri = f"{path}/index.html"  # the explorer links to zoo/FILE.py#L12
            site.append(page)
    for page, names in REFERENCE.items():
        text = "".join(f"\n::: {name}\n" for name in names)
        title = TITLES[pathlib.Path(page).stem]
        site.append(File.generated(config, page, content=f"# {title}\n{text}"))
    site.append(File.generated(config, "reference/flags.md", content=flags()))
    site.append(File.generated(config, "explorer.html", content=explorer()))
    for file in site:
        if file.src_uri == HOME:
            file.dest_uri = "index.html"
    return Files(site)


def on_page_markdown(markdown: str, page, **_) -> str:
    """Points links to source files to their pages, and shows the explorer on the first page."""
    if page.file.src_uri == HOME:
        page.meta["hide"] = ["navigation", "toc"]
        markdown = markdown.replace(EXPLORER_MARK, EXPLORER_FRAME)
    if page.file.src_uri == PROOF:
        program = runpy.run_path(str(ROOT / "tests" / "support" / "proof.py"))
        markdown = program["complete_page"]()
    folder = ROOT / pathlib.Path(page.file.src_uri).parent

    def to_page(match: re.Match) -> str:
        target = folder / match[1]
        if target.is_dir():
            readme = target / "README.md"
            return f"{match[1].rstrip('/')}/README.md" if readme.exists() else "."
        if target.suffix not in COPIED and target.exists():
            return f"{match[1]}.md"
        return match[1]

    return LINK.sub(to_page, markdown)


def on_page_content(html: str, page, **_) -> str:
    """Adds a file's text to its page, without a Markdown parser's work on all its lines."""
    return html + SOURCES.get(page.file.src_uri, "")


def highlighted(path: str) -> str:
    """A file's text in HTML; empty for files that are not text."""
    try:
        text = (ROOT / path).read_text()
    except UnicodeDecodeError:
        return ""
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    html = highlight(
        text, lexer, HtmlFormatter(linenos="inline", linespans="L", cssclass="highlight")
    )
    return re.sub(r'id="L-(\d+)"', r'id="L\1"', html)


def table_page(path: str) -> str:
    """A page with a table, and what it says of itself in index.csv beside it."""
    rows = read_table(path)
    cells = [[html.escape(cell) for cell in row] for row in rows]
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in cells[1:]]
    head = "".join(f"<th>{cell}</th>" for cell in cells[0])
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    about = {name: rest for name, *rest in read_table(f"{TABLES}/index.csv")}
    what, command = about.get(pathlib.Path(path).stem, (pathlib.Path(path).stem, ""))
    title, _, conditions = what.partition(". ")
    shown = f"```sh\n{command}\n```\n\n" if command else ""
    return f"# {title}\n\n{conditions}\n\n{shown}<table><tr>{head}</tr>{body}</table>\n"


@functools.cache
def read_table(path: str) -> list[list[str]]:
    with (ROOT / path).open(newline="") as file:
        return list(csv.reader(file))


@functools.cache
def flags() -> str:
    """A page with the flags of every command."""
    command = [sys.executable, "-m", "recipes.docs.mkdocs_hooks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def print_flags() -> None:
    """Prints that page. One process runs `--help` of all commands, so JAX is imported once."""
    print("# Flags by command")
    for name in sorted(["copy", *(path.stem for path in (ROOT / "recipes").glob("[!_]*.py"))]):
        for argv in COMMANDS.get(name, [[]]):
            sys.argv = [name, *argv, "--help"]
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
                runpy.run_module(f"recipes.{name}", run_name="__main__", alter_sys=True)
            title = " ".join((f"recipes.{name}", *argv))
            print(f"\n## {title}\n\n```text\n{shown.getvalue().rstrip()}\n```")
            if name in ENTRIES:
                print(f"\nA resumed run must have the same {', '.join(fixed_flags(name))}.")


def fixed_flags(recipe: str) -> list[str]:
    """The flags of a training recipe that may not change when its run resumes."""
    groups = []
    begin, start.start = start.start, lambda main, *flag_groups, **_: groups.extend(flag_groups)
    try:
        runpy.run_module(f"recipes.{recipe}", run_name="__main__")
    finally:
        start.start = begin
    fields = [field for group in groups for field in group.__dataclass_fields__.values()]
    return [f"`--{field.name}`" for field in fields if not field.metadata["may_change"]]


@functools.cache
def explorer() -> str:
    """The explorer's page, whose links lead to the site's source pages."""
    with tempfile.TemporaryDirectory() as folder:
        page = pathlib.Path(folder, "explorer.html")
        command = [sys.executable, "-m", "recipes.explore", f"--html={page}", "--source=./"]
        subprocess.run([*command, "--open=false"], cwd=ROOT, check=True)
        return page.read_text()


if __name__ == "__main__":
    print_flags()
