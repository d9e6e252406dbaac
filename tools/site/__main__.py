"""Build the site from the committed notebooks, which are not run:  python tools/site

python tools/site --out FOLDER 1_maths/03_loss 1_maths/04_sde    a part of it, elsewhere

Copies README, notebooks and what they link to into a temporary folder, adds the table of contents
and the API, and lets Sphinx make HTML of it. Needs: pip install -e '.[docs]'
"""

import argparse
import json
import posixpath
import re
import shutil
import sys
import tempfile
from pathlib import Path

import api
from contents import NBS, ROAD, ROOT, appendices, notebooks

HERE = Path(__file__).resolve().parent
VIEW = "application/vnd.jupyter.widget-view+json"
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")


class Names:
    "What inline code can refer to: a notebook, a module, or a public name."

    def __init__(self, pages: list[str], modules: list[api.Module]):
        self.pages = pages
        self.by_stem = {name.split("/")[-1]: name for name in pages}
        self.modules = {module.name for module in modules}
        homes = {}
        for module in modules:
            for item in module.items:
                homes.setdefault(item.name, []).append(module.name)
        # a plain word such as `option` may mean something else
        is_plain = re.compile(r"[a-z]+|[A-Z]+|[A-Z][a-z]+").fullmatch
        self.homes = {n: h[0] for n, h in homes.items() if len(h) == 1 and not is_plain(n)}

    def notebook(self, code: str) -> str | None:
        "`1_maths/03_loss`, `03_loss` or `nbs/1_maths/03_loss.ipynb` -> 1_maths/03_loss."
        name = code.removeprefix("nbs/").removesuffix(".ipynb")
        return name if name in self.pages else self.by_stem.get(name)

    def link(self, code: str, folder: str) -> str | None:
        "Markdown for inline code that names something, or None."
        if page := self.notebook(code):
            return f"[`{code}`]({posixpath.relpath(f'nbs/{page}.ipynb', folder)})"
        full = code if code.startswith("glm_grpo.") else f"glm_grpo.{code}"
        if full in self.modules:
            return f"{{py:mod}}`{code} <{full}>`"
        if home := self.homes.get(code.removesuffix("()")):
            return f"{{py:obj}}`{code} <{home}.{code.removesuffix('()')}>`"
        return None


def outside_of_code(text: str, change) -> str:
    "Apply a change to a Markdown text, but not to its blocks of code."
    pieces = re.split(r"(?ms)(^\s*```.*?^\s*```\s*?$)", text)
    return "".join(piece if i % 2 else change(piece) for i, piece in enumerate(pieces))


class Source:
    "The folder that Sphinx reads. It is laid out as the repository, so links stay as they are."

    def __init__(self, folder: Path, pages: list[str]):
        self.folder, self.pages = folder, pages
        self.modules = [module for module in api.modules() if module.notebook in pages]
        self.names = Names(pages, self.modules)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def keep_link(self, match: re.Match, folder: str) -> str:
        "A link to a file: the file is copied; a page that is not part of the site is only named."
        label, target = match[1], match[2]
        if re.match(r"[a-z]+:|#|/", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target.split("#")[0]))
        page = path.removeprefix("nbs/").removesuffix(".ipynb")
        if path.endswith(".ipynb"):
            return match[0] if page in self.pages else label.strip("![]")
        file = ROOT / path
        if not file.is_file():
            return label.strip("![]")
        if path not in PAGES:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, self.folder / path)
        return match[0]

    def markdown(self, text: str, folder: str) -> str:
        "Names in inline code become links, and files that are linked to are copied."

        def change(piece):
            piece = re.sub(
                r"(?<![`\[])`([^`\n]+)`(?![`\]])",
                lambda m: self.names.link(m[1], folder) or m[0],
                piece,
            )
            # a formula of its own needs an empty line before and after it
            piece = re.sub(r"(?ms)^(\$\$.+?\$\$)[ ]*$", r"\n\1\n", piece)
            link = r"(!?\[(?:[^\[\]]|`[^`]*`)*\])\(([^)\s]+)\)"
            return re.sub(link, lambda m: self.keep_link(m, folder), piece)

        return outside_of_code(text, change)

    def write_notebook(self, name: str) -> None:
        notebook = json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))
        folder = posixpath.dirname(f"nbs/{name}")
        cells = []
        for cell in notebook["cells"]:
            text = "".join(cell["source"])
            if re.match(r"#\|\s*hide\b", text):
                continue
            if cell["cell_type"] == "markdown":
                text = self.markdown(text, folder)
            else:
                text = re.sub(r"(?m)^#\|.*\n?", "", text)
                cell["outputs"] = [o for o in cell["outputs"] if VIEW not in o.get("data", {})]
            if text.strip():
                cells.append({**cell, "source": text})
        made = next((m.name for m in self.modules if m.notebook == name), None)
        if made:
            cells[0]["source"] += f"\n\n*Exports to* {{py:mod}}`{made}`\n"
        notebook["cells"] = cells
        lexer = {"name": "python", "pygments_lexer": "ipython3"}
        notebook["metadata"].pop("widgets", None)  # they need a kernel
        notebook["metadata"]["language_info"] = lexer
        self.write(f"nbs/{name}.ipynb", json.dumps(notebook))

    def claim(self, name: str) -> tuple[str, str]:
        "Title and claim of a notebook."
        cells = json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        text = "".join(cells[0]["source"])
        claim = re.search(r"(?m)^> (.*)$", text)
        return re.search(r"(?m)^# (.*)$", text)[1], claim[1] if claim else ""

    def write_floor(self, title: str, names: list[str]) -> str:
        "The page of a floor: its appendices with their claims -> name of the page."
        rows = []
        for name in names:
            heading, claim = self.claim(name)
            claim = self.markdown(claim, "appendix")
            rows.append(f"- [{heading}](../nbs/{name}.ipynb). {claim}")
        page = f"appendix/{title.lower()}"
        note = "Appendices: read them when you need them.\n\n"
        tree = toctree([f"../nbs/{name}" for name in names])
        self.write(f"{page}.md", f"# {title}\n\n{note}" + "\n".join(rows) + f"\n\n{tree}")
        return page

    def write_api(self) -> str:
        parts = []
        for module in self.modules:
            self.write(f"api/{module.name}.md", api.write_module(module))
            parts.append(f"- {{py:mod}}`{module.name}`: {api.as_markdown(module.doc)}")
        tree = toctree([module.name for module in self.modules])
        text = "Every public name, with its docstring and the comments beside its parameters.\n\n"
        self.write("api/index.md", f"# API\n\n{text}" + "\n".join(parts) + f"\n\n{tree}")
        return "api/index"

    def write_all(self) -> None:
        for name in self.pages:
            self.write_notebook(name)
        floors = [self.write_floor(*floor) for floor in appendices(self.pages).items()]
        road = [f"nbs/{name}" for name in ROAD if name in self.pages]
        others = [name for name in PAGES if (ROOT / name).exists()]
        for name in others:
            self.write(name, self.markdown((ROOT / name).read_text(encoding="utf-8"), ""))
        last = [self.write_api(), *(name.removesuffix(".md") for name in others)]
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        trees = toctree(road, "Main road"), toctree(floors, "Appendices"), toctree(last, "More")
        self.write("index.md", self.markdown(readme, "") + "\n\n" + "\n".join(trees))


def toctree(pages: list[str], caption: str | None = None) -> str:
    title = f":caption: {caption}\n" if caption else ""
    return f"```{{toctree}}\n:hidden:\n{title}\n" + "\n".join(pages) + "\n```\n"


def build(out: Path, pages: list[str], sphinx_options: list[str]) -> int:  # exit status
    if out.exists() and any(out.iterdir()) and not (out / ".buildinfo").exists():
        sys.exit(f"{out}: there is something else than a site in it. Give an empty folder.")
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Source(folder / "source", pages).write_all()
        words = ["-b", "html", "-c", HERE, "-d", folder / "doctrees", *sphinx_options]
        status = build_main([str(word) for word in [*words, folder / "source", folder / "html"]])
        if status == 0:
            shutil.rmtree(out, ignore_errors=True)
            shutil.move(folder / "html", out)
    return status


def main() -> int:  # exit status
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="floor/name; none: all")
    parser.add_argument("--out", type=Path, default=ROOT / "_site", help="folder of the site")
    parser.add_argument("--strict", action="store_true", help="a warning is an error")
    options = parser.parse_args()
    unknown = sorted(set(options.notebooks) - set(notebooks()))
    if unknown:
        parser.error(f"no such notebook: {', '.join(unknown)}; give floor/name, as 1_maths/03_loss")
    sphinx_options = ["-q", "-W", "--keep-going"] if options.strict else ["-q"]
    status = build(options.out, options.notebooks or notebooks(), sphinx_options)
    if status == 0:
        print(f"open {options.out / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
