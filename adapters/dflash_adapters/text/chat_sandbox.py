"""A Jinja environment that stops a hostile template before it uses up time or memory.

Jinja's sandbox denies a template access to Python's internals; this one also limits time and
memory, within the process and without signals, since servers render on any thread:

* every value that a template makes is weighed, and limited to a few times the caller's inputs;
  operations that amplify (``*``, ``replace``, ``join``, …) are checked before they run;
* everything made, printed, compared, looked up or looped over is charged to one budget, and each
  charge checks a deadline.

It is the first of two limits: programs render in a separate process that can be killed
(``chat_child``), since metering cannot cover all that Python can be made to do.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Limits in characters and items: a constant, plus a multiple of the caller's inputs.
_VALUE_ALLOWANCE, _VALUE_MULTIPLE = 1 << 20, 4
_TOTAL_ALLOWANCE, _TOTAL_MULTIPLE = 1 << 23, 64
_ITEM_WEIGHT = 4  # of every value besides its characters, for the time to weigh it
_MAX_DEPTH = 64
_MAX_INT_BITS = 128
_COMPARED_AT_ONCE = 64  # weight compared for one unit: comparing is much faster than making


class Budget:
    """The remaining budget of one rendering; the clock starts with its construction.

    The weight of a value is its characters and items, nested ones included.
    """

    def __init__(self, inputs: Any, deadline_s: float) -> None:
        """Raises: SecurityError if the inputs are nested too deeply."""
        self._inputs = inputs
        # Cached weights of all containers in the inputs, by identity: templates use the list of
        # messages once a message.
        self._known: dict[int, int] = {}
        self._max_weight = sys.maxsize
        weight = self._weigh(inputs, 0, self._known)
        self._max_weight = _VALUE_ALLOWANCE + _VALUE_MULTIPLE * weight
        self._left = _TOTAL_ALLOWANCE + _TOTAL_MULTIPLE * weight
        self._ends_at = time.monotonic() + deadline_s

    def charge(self, amount: int) -> None:
        """Raises: SecurityError if the budget or the time is used up."""
        self._left -= amount
        if self._left < 0:
            raise SecurityError("the template makes too much text or loops too often")
        if time.monotonic() > self._ends_at:
            raise SecurityError("the template takes too long")

    def check(self, weight: int) -> None:
        """Raises: SecurityError if a value of this weight would be too large."""
        if weight > self._max_weight:
            raise SecurityError("the template makes too large a value")

    def measure(self, value: Any) -> int:
        """The weight of a value. Raises: SecurityError if it is too large."""
        weight = self._weigh(value, 0, None)
        self.check(weight)
        return weight

    def admit(self, value: Any) -> Any:
        """Charge for a value that was just made, without its parts, and return it."""
        if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise SecurityError("the template computes too large a number")
        self.measure(value)
        self.charge(1 + (len(value) if isinstance(value, Collection) else 0))
        return value

    def compare(self, value: Any) -> None:
        """Charge for a value that is compared or searched."""
        self.compare_often(self.measure(value), 1)

    def compare_often(self, weight: int, times: int) -> None:
        """Charge for comparing or copying a value of this weight `times` times."""
        self.charge(1 + weight * times // _COMPARED_AT_ONCE)

    def _weigh(self, value: Any, depth: int, record: dict[int, int] | None) -> int:
        """Weight of a value, or of enough of it to exceed the limit."""
        if isinstance(value, (str, range)):
            return _ITEM_WEIGHT + len(value)
        if isinstance(value, int):
            return _ITEM_WEIGHT + value.bit_length() // 8
        if not isinstance(value, Collection):
            return _ITEM_WEIGHT
        if (known := self._known.get(id(value))) is not None:
            return known
        if depth >= _MAX_DEPTH:
            raise SecurityError("a value is nested too deeply")
        items = (x for pair in value.items() for x in pair) if isinstance(value, dict) else value
        weight = _ITEM_WEIGHT
        for item in items:
            weight += self._weigh(item, depth + 1, record)
            if weight > self._max_weight:
                break
        if record is not None:
            record[id(value)] = weight
        return weight


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MAX_COUNT = 1000  # widths, digits, numbers of columns

_GLOBALS = frozenset({"cycler", "dict", "joiner"})
_FILTERS = _words(
    """abs attr batch capitalize count d default dictsort e escape first float groupby indent int
    items join last length list lower map max min reject rejectattr replace reverse round safe
    select selectattr slice sort string sum title trim unique upper"""
)
_COUNTED_FILTERS = frozenset({"batch", "indent", "round", "slice", "tojson"})
_METHODS: Mapping[type, frozenset[str]] = {
    str: _words(
        """capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal
        isdigit islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix
        removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith
        strip swapcase title upper"""
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    # Templates need no method of these, and some amplify.
    **dict.fromkeys((int, float, bytes, range, type), frozenset[str]()),
}
_WIDE_BRACES = re.compile(r"\{[^{}]*(?::[^{}]*\d{4}|\{)")
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[^%a-zA-Z]*(?:\d{4}|\*)")


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget. One for each rendering."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, budget: Budget, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, Meter, "jinja2.ext.loopcontrols"],
            optimized=False,  # folding constants would run filters at compile time
            finalize=self._printed,
            cache_size=0,
        )
        self.budget = budget
        allowed = {name: self.filters[name] for name in _FILTERS} | dict(filters)
        self.filters = {name: self._guarded(name, function) for name, function in allowed.items()}
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._metered_test(function) for name, function in tests.items()}
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals |= {"namespace": _QuietNamespace, "range": self._range}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of an operator's result, then compute it."""
        weights = self.budget.measure(left), self.budget.measure(right)
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**":
            if not numbers or abs(left) > 2**16 or abs(right) > 16:
                raise SecurityError("the template computes too large a power")
        elif operator == "*" and not numbers:
            times = next((x for x in (left, right) if isinstance(x, int)), 1)
            texts = [len(x) for x in (left, right) if isinstance(x, str)]
            self.budget.check(max(texts or weights) * max(1, times))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, "%", _WIDE_PERCENT, weights[1])
        else:
            self.budget.check(sum(weights))
        return self.budget.admit(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Check the size of a function's or method's result, then call it."""
        if isinstance(getattr(function, "__self__", None), Meter):
            return function(*args)
        values = [self._listed(value) for value in args]
        weight = sum(self.budget.measure(value) for value in (*values, *kwargs.values()))
        # The sandbox wraps `format`; the wrapped method has the owner.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        for kind, names in _METHODS.items():
            if isinstance(owner, kind):
                name = method.__name__
                if name not in names:
                    raise SecurityError(f"{kind.__name__}.{name} is not available to templates")
                self._check_method(name, owner, values, weight)
                break
        return self.budget.admit(super().call(context, function, *values, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``, charged: filters use it to follow attribute paths for each item."""
        self.budget.charge(1)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``, charged."""
        self.budget.charge(1)
        return super().getattr(obj, attribute)

    def _check_method(self, name: str, owner: Any, args: Sequence[Any], weight: int) -> None:
        """Refuse a method call that amplifies too much."""
        if name == "replace" and len(args) >= 2:
            self._check_replace(owner, *args[:2])
        elif name == "join" and args:
            self._check_join(args[0], owner)
        elif name == "format":
            text = owner.replace("{{", "")
            self._check_format(text, "{", _WIDE_BRACES, weight)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter: its result is checked before it runs and charged after."""
        num_hidden = 1 if hasattr(function, "jinja_pass_arg") else 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            hidden, values = args[:num_hidden], [self._listed(x) for x in args[num_hidden:]]
            self._check_filter(name, values, kwargs)
            return self.budget.admit(function(*hidden, *values, **kwargs))

        # Jinja's marks of a filter that takes the context or has an async variant.
        vars(guarded).update(getattr(function, "__dict__", {}))
        return guarded

    def _metered_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a test, such as ``is in``, to charge for its operands."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                self.budget.compare(value)
            return function(*args, **kwargs)

        vars(metered).update(getattr(function, "__dict__", {}))
        return metered

    def _check_filter(self, name: str, values: list[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a filter that amplifies too much."""
        options = [*values[1:], *kwargs.values()]
        weight = self.budget.measure(values[0])
        widest = max((self.budget.measure(x) for x in options), default=0)
        if name in _COUNTED_FILTERS:
            counts = [abs(x) for x in options if isinstance(x, int)]
            if max(counts, default=0) > _MAX_COUNT:
                raise SecurityError(f"the template passes too large a number to {name}")
            if name in ("indent", "tojson"):
                self.budget.check(weight * max(1, widest, *counts))
        elif name == "replace":
            if kwargs or len(values) < 3:
                raise SecurityError("replace takes what to replace and by what, unnamed")
            self._check_replace(*values[:3])
        elif name == "join":
            self._check_join(values[0], options[0] if options else "")
        elif name == "sum" and not all(isinstance(x, (int, float, str)) for x in options):
            # The start is a list: each partial sum is a new list, so copying is quadratic.
            self.budget.compare_often(weight, len(values[0]))

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        text, old, new = str(text), str(old), str(new)
        self.budget.check(len(text) + text.count(old) * len(new))

    def _check_join(self, items: Any, separator: Any) -> None:
        num_items = len(items) if hasattr(items, "__len__") else 1
        weight = self.budget.measure(items)
        self.budget.check(weight + num_items * self.budget.measure(separator))

    def _check_format(self, text: str, mark: str, wide: re.Pattern[str], weight: int) -> None:
        if wide.search(text):
            raise SecurityError("the template formats with too wide a field")
        # Each field may print all arguments.
        self.budget.check(len(text) + text.count(mark) * weight)

    def _listed(self, value: Any) -> Any:
        """Convert an iterator to a list, which can be weighed."""
        return self.budget.admit(list(value)) if isinstance(value, Iterator) else value

    @pass_context  # so that Jinja never calls it while compiling
    def _printed(self, _context: Context, value: Any) -> Any:
        """Charge for a printed value; Jinja calls it for all output, macros and captures too."""
        self.budget.charge(self.budget.measure(value))
        return value

    def _range(self, *bounds: int) -> range:
        result = range(*bounds)
        self.budget.check(len(result))
        return result


class _QuietNamespace(Namespace):
    """A namespace that prints without its content, since namespaces may refer to each other."""

    def __repr__(self) -> str:
        return "namespace"


class GenerationBlock(Extension):
    """``{% generation %}``, by which some templates mark the assistant's text; renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Meter(Extension):
    """Charges loops, macros, comparisons, literals, slices and ``~``: Jinja has no hooks there."""

    def turn(self, static_text: int) -> bool:
        """Charge an iteration of a loop or a call of a macro, with its static characters."""
        self._budget.charge(1 + static_text)
        return True

    def compared(self, value: Any) -> Any:
        """Charge one side of a comparison, or of ``in``."""
        self._budget.compare(value)
        return value

    def concat(self, *parts: Any) -> str:
        """The ``~`` operator, checked and charged."""
        self._budget.check(sum(self._budget.measure(part) for part in parts))
        text = "".join(str(part) for part in parts)
        self._budget.admit(text)
        return text

    def made(self, value: Any) -> Any:
        """Charge a literal list, tuple or dict, or a slice."""
        return self._budget.admit(value)

    @property
    def _budget(self) -> Budget:
        assert isinstance(self.environment, SandboxEnvironment)
        return self.environment.budget

    def install(self, template: nodes.Template) -> nodes.Template:
        """Insert calls of this meter into a parsed template, which cannot name them itself."""
        blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *template.find_all(nodes.For),
            *template.find_all(nodes.Macro),
            *template.find_all(nodes.CallBlock),
        ]
        for block in blocks:
            static = sum(len(text.data) for text in block.find_all(nodes.TemplateData))
            block.body.insert(0, nodes.ExprStmt(self._call("turn", [nodes.Const(static)])))
            if isinstance(block, nodes.For) and block.test is not None:
                block.test = nodes.And(self._call("turn", [nodes.Const(0)]), block.test)
        self._replace_children(template)
        return template

    def _replace_children(self, node: nodes.Node) -> None:
        for field, child in list(node.iter_fields()):
            if isinstance(child, list):
                setattr(node, field, [self._metered(item) for item in child])
            else:
                setattr(node, field, self._metered(child))

    def _metered(self, node: Any) -> Any:
        if not isinstance(node, nodes.Node):
            return node
        self._replace_children(node)
        match node:
            case nodes.Concat():
                return self._call("concat", node.nodes)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return self._call("made", [node])
            case nodes.Getitem(arg=nodes.Slice()):
                return self._call("made", [node])
            case nodes.Compare():
                sides: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
                for side in sides:
                    if not isinstance(side.expr, nodes.Const):
                        side.expr = self._call("compared", [side.expr])
        return node

    def _call(self, method: str, args: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(self.attr(method), args, [], None, None)
