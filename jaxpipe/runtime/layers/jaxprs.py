"""Traced programs as lists of equations: the only module that knows what jaxprs are made of."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import Jaxpr

from jaxpipe.runtime.types import Arrays, Tree

Eqn: TypeAlias = Any
"""An equation of a program; jax's own types give its variables no shape."""
Atom: TypeAlias = Any
"""A variable or a literal of a program."""
Env: TypeAlias = dict[Atom, Tree]
"""Values of a program's variables."""
Vars: TypeAlias = set[Atom]
Eqns: TypeAlias = Sequence[Eqn]

_INLINED = {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "remat"),
    *("custom_jvp_call", "custom_vjp_call"),
}

FORMS = {
    *("broadcast_in_dim", "concatenate", "convert_element_type", "dynamic_slice", "reshape"),
    *("rev", "slice", "split", "squeeze", "stop_gradient", "transpose"),
}
"""Primitives that bring values into another form."""

_ARITHMETIC = {
    *("add", "add_any", "broadcast_in_dim", "convert_element_type", "integer_pow", "mul", "neg"),
    *("reshape", "select_n", "square", "squeeze", "sub"),
}
"""Primitives that cost no more than to read their results, if their operands are read anyway."""


def flatten(closed: core.ClosedJaxpr, *, selects: bool = False) -> core.ClosedJaxpr:
    """Inlines the calls of a program, so that it is one list of equations.

    ``selects`` turns conditionals into selections: every branch runs, and one result is taken.
    Calls of the host that return nothing, such as prints, are not repeated in a backward.
    """

    jaxpr, eqns, constants = closed.jaxpr, list[Eqn](), consts(closed)
    variables = {v: v for v in (*jaxpr.invars, *constants)}
    outputs = _inline(jaxpr, variables, eqns, constants, selects=selects)
    program = jaxpr.replace(constvars=[*constants], outvars=outputs, eqns=eqns)
    return core.ClosedJaxpr(program, [*constants.values()])


def _inline(
    jaxpr: Jaxpr,
    known: dict[Atom, Atom],
    eqns: list[Eqn],
    constants: Env,
    *,
    selects: bool,
    repeats: bool = False,
) -> list[Atom]:
    """Appends the equations of a program, with new variables for all but the known ones, and those
    of the programs that it calls; returns its results. Adds constants of these to the others."""

    def renamed(atoms: Iterable[Atom]) -> list[Atom]:
        return [known[v] if is_var(v) else v for v in atoms]

    for eqn in jaxpr.eqns:
        if repeats and not eqn.outvars:
            continue
        invars = renamed(eqn.invars)
        if eqn.primitive.name in _INLINED:
            inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
            again = repeats or eqn.params.get("differentiated", False)
        elif eqn.primitive.name == "cond" and selects:
            inner, again = _selection(eqn), repeats
        else:
            made = [core.Var(v.aval) for v in eqn.outvars]
            eqns.append(eqn.replace(invars=invars, outvars=made))
            known |= zip(eqn.outvars, made, strict=True)
            continue
        closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
        own = {core.Var(v.aval): value for v, value in consts(closed).items()}
        constants |= own
        given = zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*own, *invars), strict=True)
        outs = _inline(closed.jaxpr, dict(given), eqns, constants, selects=selects, repeats=again)
        known |= zip(eqn.outvars, outs, strict=True)
    return renamed(jaxpr.outvars)


def _selection(eqn: Eqn) -> core.ClosedJaxpr:
    """Makes the program that runs all branches of a conditional and selects one's results."""
    branches = [core.jaxpr_as_fun(branch) for branch in eqn.params["branches"]]

    def select(which: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        which = lax.clamp(jnp.int32(0), which, jnp.int32(len(branches) - 1))
        results = [branch(*operands) for branch in branches]
        return [lax.select_n(which, *one) for one in zip(*results, strict=True)]

    return jax.make_jaxpr(select)(*shapes_of_variables(eqn.invars))


def run_eqns(eqns: Eqns, env: Env) -> Env:
    """Evaluates equations in order; returns the environment grown by their outputs."""
    env = dict(env)
    for eqn in eqns:
        env.update(zip(eqn.outvars, bind(eqn, values(eqn.invars, env)), strict=True))
    return env


def bind(eqn: Eqn, operands: Arrays) -> list[Tree]:
    outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def is_var(atom: Atom) -> bool:
    return not isinstance(atom, core.Literal)


def values(atoms: Iterable[Atom], env: Env) -> list[jax.Array]:
    return [env[v] if is_var(v) else jnp.asarray(v.val, v.aval.dtype) for v in atoms]


def consts(closed: core.ClosedJaxpr) -> Env:
    return dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def signature(eqns: Eqns, given: Sequence[Atom], results: Sequence[Atom]) -> str:
    """Prints a program with its variables numbered: equal programs compute the same."""
    source = core.DebugInfo("signature", "", None, None)
    return str(core.Jaxpr((), given, results, eqns, debug_info=source))


def reachable(eqns: Eqns, start: Vars, given: Collection[Atom] = ()) -> Vars:
    """Finds the variables that depend on any of ``start`` where ``given`` is known."""
    reached = set(start).difference(given)
    for eqn in eqns:
        if any(is_var(v) and v in reached for v in eqn.invars):
            reached.update(v for v in eqn.outvars if v not in given)
    return reached


def needed(
    eqns: Eqns, outputs: Iterable[Atom], given: Collection[Atom] = (), *, calls: bool = False
) -> list[Tree]:
    """Finds the equations that ``outputs`` need where ``given`` is known, in program order; with
    ``calls`` also those of the host that return nothing, such as prints, and what these need."""
    wanted = {v for v in outputs if is_var(v)}.difference(given)
    kept = []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars) or (calls and not eqn.outvars):
            kept.append(eqn)
            wanted.update(v for v in eqn.invars if is_var(v) and v not in given)
    return kept[::-1]


def remade(eqns: Eqns, variables: Vars, given: Vars) -> Vars:
    """Finds the variables that arithmetic makes of what else is ``given``, as they are."""
    left = set(given)
    for v in [v for eqn in reversed(eqns) for v in eqn.outvars if v in variables]:
        chain = needed(eqns, [v], left - {v})
        made = {w for eqn in chain for w in eqn.outvars}
        names = (eqn.primitive.name for eqn in chain)
        if reads(chain, [v]) - made <= left and _ARITHMETIC.issuperset(names):
            left.remove(v)
    return given - left


def narrowed(eqns: Eqns, outputs: Iterable[Atom]) -> list[Eqn]:
    """Leaves out of barriers the values that nothing reads behind them.

    A backward that runs a barrier of the forward again would otherwise keep all of its operands.
    """
    read = {v for v in outputs if is_var(v)}
    narrow = []
    for eqn in reversed(eqns):
        if eqn.primitive.name == "optimization_barrier":
            pairs = [pair for pair in zip(eqn.invars, eqn.outvars, strict=True) if pair[1] in read]
            if not pairs:
                continue
            invars, outvars = map(list, zip(*pairs, strict=True))
            eqn = eqn.replace(invars=invars, outvars=outvars)
        read.update(v for v in eqn.invars if is_var(v))
        narrow.append(eqn)
    return narrow[::-1]


def copied(first: Eqns, then: Eqns, results: Iterable[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """Copies equations with new variables for what the first ones make, also in the results."""
    new = {v: core.Var(v.aval) for eqn in first for v in eqn.outvars}

    def renamed(atoms: Iterable[Atom]) -> list[Atom]:
        return [new.get(v, v) if is_var(v) else v for v in atoms]

    eqns = [*first, *then]
    copies = [eqn.replace(invars=renamed(eqn.invars), outvars=renamed(eqn.outvars)) for eqn in eqns]
    return copies, renamed(results)


def rounded(eqns: Eqns, variables: Vars) -> list[Eqn]:
    """Rounds values to their own dtype where they are made, as `jax.checkpoint` does with those it
    keeps, so that nothing reads more precise ones."""
    inexact = {v for v in variables if jnp.issubdtype(v.aval.dtype, jnp.inexact)}
    result = list[Eqn]()
    for eqn in eqns:
        before = {v: core.Var(v.aval) for v in eqn.outvars if v in inexact}
        result.append(eqn.replace(outvars=[before.get(v, v) for v in eqn.outvars]))
        for v, precise in before.items():
            bits = jnp.finfo(v.aval.dtype)
            params = {"exponent_bits": bits.nexp, "mantissa_bits": bits.nmant}
            rounding = lax.reduce_precision_p, params, core.no_effects
            result.append(core.new_jaxpr_eqn([precise], [v], *rounding))
    return result


def reads(eqns: Eqns, outputs: Iterable[Atom]) -> Vars:
    """Finds the variables that the equations read or that are returned, made here or not."""
    reads = {v for eqn in eqns for v in eqn.invars if is_var(v)}
    return reads | {v for v in outputs if is_var(v)}


def read_leaves(function: Callable[..., Tree], *args: Tree) -> list[bool]:
    """Marks the leaves of the arguments on which the function's result depends.

    Example:
      >>> read_leaves(lambda tree: tree["a"] + 0 * len(tree), {"a": 1.0, "b": 2.0})
      [True, False]
    """
    jaxpr = flatten(jax.make_jaxpr(function)(*args)).jaxpr
    read = reads(needed(jaxpr.eqns, jaxpr.outvars), jaxpr.outvars)
    return [var in read for var in jaxpr.invars]


def dependent(closed: core.ClosedJaxpr, numbers: Collection[int]) -> tuple[bool, ...]:
    """Marks the results of a program that depend on the arguments of these numbers.

    Example:
      >>> dependent(jax.make_jaxpr(lambda a, b: (a + b, b))(1.0, 2.0), [0])
      (True, False)
    """
    jaxpr = flatten(closed).jaxpr
    reached = reachable(jaxpr.eqns, {jaxpr.invars[n] for n in numbers})
    return tuple(is_var(v) and v in reached for v in jaxpr.outvars)


def divided(eqns: Eqns, outputs: Iterable[Atom], late: Vars) -> tuple[list[Eqn], list[Eqn]]:
    """Divides a program into the equations that some outputs need, with the calls of the host that
    do not depend on ``late``, and the others."""
    made_late = reachable(eqns, late)
    eqns = [eqn for eqn in eqns if eqn.outvars or made_late.isdisjoint(filter(is_var, eqn.invars))]
    first = needed(eqns, outputs, calls=True)
    ids = set(map(id, first))
    return first, [eqn for eqn in eqns if id(eqn) not in ids]


def shapes_of_variables(variables: Sequence[Atom]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables)


def bytes_of(variables: Iterable[Atom]) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)


def multiplies(eqn: Eqn) -> bool:
    """Whether an equation is a matmul of weights, a convolution, or a program of its own.

    A matmul with batch dimensions, as in attention, does not count: its operands may be much larger
    than its result.
    """
    if eqn.primitive.name == "dot_general":
        _, (batch_dims, _) = eqn.params["dimension_numbers"]
        return not batch_dims
    heavy = eqn.primitive.name in ("conv_general_dilated", "ragged_dot_general")
    return heavy or any(map(_is_program, eqn.params.values()))


def stated_flops(primitive: core.Primitive, params: Mapping[str, Any]) -> float | None:
    """Returns the attribute ``flops`` of a `jax.lax.composite`; None for what has none.

    It makes a matmul of a program whose loops nothing else can count.
    """
    if primitive.name != "composite":
        return None
    return next((float(value[0]) for key, value, _ in params["attributes"] if key == "flops"), None)


def with_stated_flops(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """Yields the equations that have `stated_flops`, also within calls, loops and branches."""
    for eqn in jaxpr.eqns:
        if stated_flops(eqn.primitive, eqn.params) is not None:
            yield eqn
        else:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from with_stated_flops(inner)


def gathers(eqn: Eqn) -> bool:
    """Whether an equation makes an array of the parts that devices have."""
    return eqn.primitive.name == "all_gather"


class Collective(NamedTuple):
    """A collective in a program: its primitive, its mesh axes and where it stands."""

    name: str
    axes: tuple[str, ...]
    place: str


def collectives(jaxpr: Jaxpr, path: tuple[str, ...] = ()) -> Iterator[Collective]:
    """Yields the collectives of a program, also those within its loops, branches and calls."""
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        axes = params.get("axes", params.get("axis_name")) or ()
        axes = (axes,) if isinstance(axes, str) else tuple(a for a in axes if isinstance(a, str))
        if axes and name not in ("axis_index", "pvary"):
            within = f", within {' / '.join(path)}" if path else ""
            yield Collective(name, axes, source_info_util.summarize(eqn.source_info) + within)
        for inner in core.jaxprs_in_params(params):
            yield from collectives(inner, (*path, params.get("name", name)))


def _is_program(param: object) -> bool:
    return isinstance(param, (core.Jaxpr, core.ClosedJaxpr, tuple)) and (
        not isinstance(param, tuple) or any(map(_is_program, param))
    )


def gathered_parts(eqns: Eqns, var: Atom, own: Vars) -> list[Tree]:
    """Finds the parts that a device gathers with others to make a value of a program; else the
    value itself. Values in ``own`` differ between devices."""
    sources = {v: eqn.invars[0] for eqn in eqns if gathers(eqn) for v in eqn.outvars}
    after = needed(eqns, [var], sources)
    made = {v for eqn in after for v in eqn.outvars}
    behind = (reads(after, [var]) - made) & own
    if not behind <= sources.keys() or any(eqn.primitive.name not in FORMS for eqn in after):
        return [var]
    parts = [sources[v] for v in sources if v in behind]  # in the same order in every process
    return parts if bytes_of(parts) < bytes_of([var]) else [var]
