"""Reads a package's source without importing it: is a symbol there, does it say what is relied on?

Text is compared as the parser sees it, so that line breaks and quotes do not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

Rule = Callable[["SourceTree", str], "str | None"]
"""Given the tree and a file: what is broken, or None."""


class SourceTree:
    """The source files of one package.

    Args:
        root: the folder that holds the package's modules.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, ast.Module | None] = {}

    def text(self, file: str) -> str | None:
        """A file's text, None when it is gone."""
        try:
            return (self.root / file).read_text(encoding="utf-8")
        except OSError:
            return None

    def node(self, file: str, symbol: str) -> ast.AST | None:
        """The definition of ``Class.method``, of a function or of a module's variable; "" is the module."""
        if file not in self._modules:
            text = self.text(file)
            self._modules[file] = ast.parse(text) if text is not None else None
        found: ast.AST | None = self._modules[file]
        for part in symbol.split(".") if symbol else ():
            found = _child(found, part) if found is not None else None
        return found


def _child(parent: ast.AST, name: str) -> ast.AST | None:
    last = None
    for child in getattr(parent, "body", ()):
        if name in _names(child):
            last = child
    return last


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


@cache
def _normal(text: str) -> str:
    """A piece of code without spaces and line breaks, quotes as the parser writes them."""
    with suppress(SyntaxError):
        text = ast.unparse(ast.parse(text))
    return "".join(text.split())


def has(*symbols: str) -> Rule:
    """The symbols are there."""

    def rule(tree: SourceTree, file: str) -> str | None:
        if tree.text(file) is None:
            return f"{file} is gone"
        gone = [symbol for symbol in symbols if tree.node(file, symbol) is None]
        return f"{file} has no {', '.join(gone)}" if gone else None

    return rule


def absent(*symbols: str) -> Rule:
    """The symbols are not there."""

    def rule(tree: SourceTree, file: str) -> str | None:
        found = [symbol for symbol in symbols if tree.node(file, symbol) is not None]
        return f"{file} has {', '.join(found)}" if found else None

    return rule


def takes(symbol: str, *names: str) -> Rule:
    """A function takes these parameters, in this order (others may stand between and behind)."""

    def rule(tree: SourceTree, file: str) -> str | None:
        node = tree.node(file, symbol)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"{file} has no function {symbol}"
        found = parameters(node)
        places = [found.index(name) if name in found else -1 for name in names]
        if -1 in places or places != sorted(places):
            return f"{file}: {symbol} takes ({', '.join(found)}), not ({', '.join(names)})"
        return None

    return rule


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of a function's parameters."""
    spec = node.args
    return [arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]


def says(symbol: str, *lines: str) -> Rule:
    """The definition holds these pieces of code."""

    def rule(tree: SourceTree, file: str) -> str | None:
        node = tree.node(file, symbol)
        if node is None:
            return f"{file} has no {symbol or 'such file'}"
        text = "".join(ast.unparse(node).split())
        missing = [line for line in lines if _normal(line) not in text]
        return f"{file}: {symbol or 'the module'} no longer says `{missing[0]}`" if missing else None

    return rule


def lacks(symbol: str, *pieces: str) -> Rule:
    """The definition is there and holds none of these."""

    def rule(tree: SourceTree, file: str) -> str | None:
        node = tree.node(file, symbol)
        if node is None:
            return f"{file} has no {symbol}"
        text = ast.unparse(node)
        found = [piece for piece in pieces if piece in text]
        return f"{file}: {symbol} now says `{found[0]}`" if found else None

    return rule


def raw(*pieces: str) -> Rule:
    """The file, whatever its language, holds these pieces."""

    def rule(tree: SourceTree, file: str) -> str | None:
        text = tree.text(file)
        if text is None:
            return f"{file} is gone"
        missing = [piece for piece in pieces if piece not in text]
        return f"{file} no longer holds `{missing[0]}`" if missing else None

    return rule
