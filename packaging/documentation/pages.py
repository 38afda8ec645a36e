"""Makes the documentation that packages install, from docs/: pages.py html|man FOLDER

  html  every page for a browser, with its images; index.html is docs/README.md
  man   gateway.toml.5 and agent.toml.5, from docs/configuration.md: a test compares that page with the keys of the programs

Needs Debian's python3-markdown-it. The output depends on nothing but docs/ and SOURCE_DATE_EPOCH.
"""

import html
import os
import pathlib
import re
import shutil
import sys
import time

from markdown_it import MarkdownIt

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PARSER = MarkdownIt("commonmark").enable("table")
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 sans-serif; color-scheme: light dark; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ border: 1px solid #8888; padding: .25rem .5rem; text-align: left; vertical-align: top; }}
pre {{ overflow-x: auto; padding: .5rem; border: 1px solid #8888; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
<nav><a href="index.html">Documentation</a></nav>
{body}</body>
</html>
"""


def plain(token) -> str:
    """The text of an inline token, without marks."""
    return "".join(child.content if child.type != "softbreak" else " " for child in token.children)


def anchor(heading: str) -> str:
    """The name of a heading in links, as forges make it."""
    kept = [it for it in heading.lower() if it.isalnum() or it in " -_"]
    return "".join(kept).replace(" ", "-")


def is_page(target: str) -> bool:
    return "://" not in target and target.split("#")[0].endswith(".md")


def html_name(target: str) -> str:
    """The target of a link to a page, as the HTML page is called."""
    path, mark, rest = target.partition("#")
    name = "index" if path == "README.md" else path.removesuffix(".md")
    return f"{name}.html{mark}{rest}"


def write_html(folder: pathlib.Path) -> None:
    for page in sorted(DOCS.glob("*.md")):
        if page.name == "SUMMARY.md":
            continue
        tokens = PARSER.parse(page.read_text())
        title = page.stem
        for before, token in zip(tokens, tokens[1:]):
            if before.type == "heading_open":
                before.attrSet("id", anchor(plain(token)))
                title = plain(token) if before.tag == "h1" else title
            for child in token.children or []:
                target = child.attrGet("href") if child.type == "link_open" else None
                if target and is_page(target):
                    child.attrSet("href", html_name(target))
        body = PARSER.renderer.render(tokens, PARSER.options, {})
        written = PAGE.format(title=html.escape(title), body=body)
        (folder / html_name(page.name)).write_text(written)
    # Not their modes, which differ between a checkout and an archive of the source.
    (folder / "images").mkdir()
    for image in sorted((DOCS / "images").iterdir()):
        shutil.copyfile(image, folder / "images" / image.name)


def escape(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga").replace("^", "\\(ha")
    return re.sub(r"^\.", r"\\&.", text.replace("~", "\\(ti"), flags=re.MULTILINE)


def roff(token) -> str:
    """An inline token: code and strong text in bold; links are their text, and the page."""
    parts, target = [], ""
    for child in token.children:
        match child.type:
            case "text":
                parts.append(escape(child.content))
            case "softbreak" | "hardbreak":
                parts.append("\n")
            case "code_inline":
                parts.append(f"\\fB{escape(child.content)}\\fR")
            case "strong_open":
                parts.append("\\fB")
            case "strong_close":
                parts.append("\\fR")
            case "link_open":
                target = child.attrGet("href")
            case "link_close" if is_page(target):
                # A page in the folder that FILES names.
                parts.append(f" ({escape(target.split('#')[0])})")
            case "em_open" | "em_close" | "link_close":
                pass
            case other:
                raise SystemExit(f"docs/configuration.md: no man page has {other}")
    return "".join(parts)


def roff_row(heads: list, cells: list) -> list:
    """A row of a table: the first cell, and what it means below."""
    key, *rest = cells
    if heads == ["key", "type", "default", "meaning"]:
        kind, default, meaning = rest
        shown = default if default == "required" else f"default: {default}"
        return [".TP", f"{key} ({kind}; {shown})", meaning]
    return [".TP", key, ". ".join(rest)]


def roff_body(tokens: list) -> list:
    """The lines of a page, without its head."""
    lines, heads, cells = [], [], []
    for before, token in zip([None, *tokens], tokens):
        match token.type:
            case "inline" if before.type == "heading_open":
                lines.append((".SS " if before.tag == "h3" else ".SH ") + roff(token))
            case "inline" if before.type == "th_open":
                heads.append(plain(token))
            case "inline" if before.type == "td_open":
                cells.append(roff(token))
            case "inline":
                lines += [".PP" if before.level == 0 else ".IP \\(bu 2", roff(token)]
            case "fence":
                lines += [".PP", ".in +4n", ".nf", *escape(token.content).splitlines(), ".fi", ".in"]
            case "table_open":
                heads = []
            case "tr_open":
                cells = []
            case "tr_close" if cells:
                lines += roff_row(heads, cells)
    return lines


def write_man(folder: pathlib.Path) -> None:
    text = (DOCS / "configuration.md").read_text()
    day = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"])))
    for program in ("gateway", "agent"):
        section = re.search(rf"^## {program.capitalize()}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
        name = f"{program}.toml"
        lines = [
            f'.TH {name} 5 "{day}" Gw',
            ".SH NAME",
            f"{name} \\- configuration of gw\\-{program}",
            ".SH SYNOPSIS",
            f"\\fB/etc/gw/{name}\\fR",
            ".SH DESCRIPTION",
            *roff_body(PARSER.parse(section)),
            ".SH FILES",
            f"\\fB/usr/share/gw\\-{program}/{name}\\fR has every key as a comment.",
            f"\\fB/usr/share/doc/gw\\-{program}\\fR has the pages (\\fB*.md\\fR, and \\fBhtml/index.html\\fR for a browser) that this one names.",
            ".SH SEE ALSO",
            f"\\fBgw\\-{program}\\fR(1)",
        ]
        (folder / f"{name}.5").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    {"html": write_html, "man": write_man}[kind](folder)
