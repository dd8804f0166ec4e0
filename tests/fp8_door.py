"""Finds casts to FP8 in a source text; only `formats.py` may hold one.

An FP8 dtype is: any name `float8_*`; such a string; the `.dtype` of what has a
name that speaks of a format or of codes, as in `storage.m_format.dtype`; attributes
assigned from one of these; variables assigned from one in their own or an enclosing
function. Such a dtype may be compared, and given to the few calls that do not convert
values. Any other call that receives one is reported, whatever its name, so that a new
spelling of a cast is reported too.
"""

import ast
import re

FP8_NAME = re.compile(r"float8_\w+")
SPEAKS_OF_FP8 = re.compile(r"(?i)format|fmt|e4m3|e5m2|codes|quantized")
# They allocate, describe, compare or reinterpret; none converts a value.
HARMLESS = {
    "SMEM",
    "ShapeDtypeStruct",
    "bitcast_convert_type",
    "dtype",
    "empty",
    "finfo",
    "format",
    "isinstance",
    "issubdtype",
    "of_dtype",
    "out_struct",
    "repr",
    "str",
    "view",
    "zeros",
    "zeros_like",
}
# Each may round a value to FP8's grid without naming a dtype of it.
FORBIDDEN = {"reduce_precision"}


def casts(source: str) -> list[str]:
    """The offending places of a source text, as "line: code"."""
    tree = ast.parse(source)
    found = _Finder()
    found.visit(tree)
    lines = source.splitlines()
    return [f"{n}: {lines[n - 1].strip()}" for n in sorted(set(found.lines))]


class _Finder(ast.NodeVisitor):
    """Walks a module, knowing which variables hold an FP8 dtype in each scope."""

    def __init__(self):
        self.lines: list[int] = []
        self.scopes: list[dict[str, bool]] = [{}]
        self.attributes: set[str] = set()

    def visit_FunctionDef(self, node):
        parameters = [n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)]
        self.scopes.append(dict.fromkeys(parameters, False))
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if node.value is not None:
            self._assign(node.target, node.value)

    def visit_NamedExpr(self, node):
        self.generic_visit(node)
        self._assign(node.target, node.value)

    def visit_For(self, node):
        self._assign(node.target, node.iter)
        self.generic_visit(node)

    def visit_ImportFrom(self, node):
        if any(FP8_NAME.fullmatch(alias.name) for alias in node.names):
            self.lines.append(node.lineno)

    def visit_Call(self, node):
        name = _last_name(node.func)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name in FORBIDDEN or (
            name not in HARMLESS and any(map(self._holds_fp8, [node.func, *arguments]))
        ):
            self.lines.append(node.lineno)
        self.generic_visit(node)

    def _assign(self, target, value):
        holds = self._holds_fp8(value)
        match target:
            case ast.Name(id=name):
                self.scopes[-1][name] = holds
            case ast.Attribute(attr=name) if holds:
                self.attributes.add(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._assign(part, value)

    def _holds_fp8(self, node) -> bool:
        """Whether an expression is, or holds, an FP8 dtype."""
        match node:
            case ast.Name(id=name):
                near = [scope[name] for scope in self.scopes if name in scope][-1:]
                return near == [True] or bool(FP8_NAME.fullmatch(name))
            case ast.Constant(value=str(text)):
                return bool(FP8_NAME.fullmatch(text))
            case ast.Attribute(value=owner, attr="dtype"):
                return bool(SPEAKS_OF_FP8.search(_last_name(owner)))
            case ast.Attribute(attr=name):
                return name in self.attributes or bool(FP8_NAME.fullmatch(name))
            case ast.Call(func=func, args=args) if _last_name(func) == "dtype":
                return any(map(self._holds_fp8, args))
            case ast.IfExp(body=a, orelse=b):
                return self._holds_fp8(a) or self._holds_fp8(b)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return any(map(self._holds_fp8, parts))
            case ast.BoolOp(values=parts):
                return any(map(self._holds_fp8, parts))
            case ast.Dict(values=parts):
                return any(map(self._holds_fp8, parts))
            case ast.Subscript(value=owner) | ast.Starred(value=owner):
                return self._holds_fp8(owner)
        return False


def _last_name(node) -> str:
    """The name nearest to the end of `a.b.name`, `f(...)` or `a[0].name`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _last_name(inner)
    return ""
