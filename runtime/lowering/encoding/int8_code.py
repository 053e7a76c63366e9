"""The product of rows and a weight in int8, compiled for this processor by LLVM.

The inner loop multiplies pairs of 16-bit integers and adds both products, which x86 does in one instruction. Weights
are widened in registers: memory and caches see 8 bits per weight.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import binding, ir

LANES: Final = 16
"""Inputs that are multiplied at a time."""
ROWS, OUTPUTS = 2, 4
"""Rows and outputs whose sums are in registers at a time."""
_LEAST_DIVISOR: Final = 1e-30
"""Rows whose numbers are all smaller are rounded to zero."""
_MAGIC: Final = 1.5 * 2**23
"""Added to a float32 of up to 22 bits, it rounds to an integer, which is then in the low bits."""

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_floats, _integers = ir.VectorType(_f32, 8), ir.VectorType(_i32, 8)
_pairs = ir.VectorType(_i32, LANES)
_even, _odd = (ir.Constant(_integers, list(range(first, LANES, 2))) for first in (0, 1))
_undefined = ir.Constant(_pairs, ir.Undefined)


def compiled() -> Callable[..., None]:
    """Return a function of the numbers of rows, outputs, inputs and rows of a block, `most`, and four addresses.

    `most` is the largest integer that inputs are rounded to. The addresses are those of `int8_kernel.product`'s
    arguments and result. It runs without the GIL.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(str(_Code().module))
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=1))
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    size, address = ctypes.c_int64, ctypes.c_void_p
    function: Any = ctypes.CFUNCTYPE(None, *[size] * 4, ctypes.c_float, *[address] * 4)(
        engine.get_function_address("product")
    )
    function.engine = engine  # it owns the code
    return function  # type: ignore[no-any-return]


class _Code:
    """Writes the kernel in LLVM's language."""

    def __init__(self) -> None:
        self.module = ir.Module()
        self.module.triple = binding.get_process_triple()
        arguments = [*[_i64] * 4, _f32, _f32.as_pointer(), _i8.as_pointer(), *[_f32.as_pointer()] * 2]
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), arguments), "product")
        self.rows, self.outputs, self.inputs, self.block, self.most = function.args[:5]
        self.x, self.weight, self.terms, self.result = function.args[5:]
        self.write = ir.IRBuilder(function.append_basic_block())
        self.rounded = self.write.alloca(_i16, self.write.mul(self.block, self.inputs))
        self.scales = self.write.alloca(_f32, self.block)
        self._loop(self._number(0), self.rows, self.block, self._rows_of_block)
        self.write.ret_void()

    def _rows_of_block(self, first: Any, _: Any) -> None:
        """Round a block of rows, and multiply them by all outputs: two rows at a time, then a last one."""
        write, one, zero = self.write, self._number(1), self._number(0)
        left = write.sub(self.rows, first)
        count = write.select(write.icmp_signed("<", left, self.block), left, self.block)
        even = write.sub(count, write.srem(count, self._number(ROWS)))
        self._loop(zero, count, one, lambda row, _: self._round(write.add(first, row), row))

        def columns(output: Any, _: Any) -> None:
            self._loop(zero, even, self._number(ROWS), lambda row, _: self._tile(first, row, output, ROWS))
            self._loop(even, count, one, lambda row, _: self._tile(first, row, output, 1))

        self._loop(zero, self.outputs, self._number(OUTPUTS), columns)

    def _round(self, row: Any, place: Any) -> None:
        """Round a row to integers of up to `most`, and note their scale; NaN if a number is not finite."""
        write, zero, step = self.write, self._number(0), self._number(8)
        source = write.gep(self.x, [write.mul(row, self.inputs)])
        target = write.gep(self.rounded, [write.mul(place, self.inputs)])

        def larger(start: Any, found: Sequence[Any]) -> Sequence[Any]:
            size = self._call("llvm.fabs.v8f32", _floats, self._load(write.gep(source, [start]), _floats))
            return [self._call("llvm.maximum.v8f32", _floats, found[0], size)]

        (sizes,) = self._loop(zero, self.inputs, step, larger, [ir.Constant(_floats, [0.0] * 8)])
        largest = self._call("llvm.vector.reduce.fmaximum.v8f32", _f32, sizes)
        ordinary = write.fcmp_ordered(">", largest, ir.Constant(_f32, _LEAST_DIVISOR))
        factor = self._spread(write.select(ordinary, write.fdiv(self.most, largest), ir.Constant(_f32, 0.0)))
        not_finite = write.fsub(largest, largest)
        write.store(write.fadd(write.fdiv(largest, self.most), not_finite), write.gep(self.scales, [place]))

        def part(start: Any, _: Any) -> None:
            numbers = write.fmul(self._load(write.gep(source, [start]), _floats), factor)
            bits = write.bitcast(write.fadd(numbers, ir.Constant(_floats, [_MAGIC] * 8)), _integers)
            short = write.trunc(bits, ir.VectorType(_i16, 8))
            stored = write.store(short, write.bitcast(write.gep(target, [start]), short.type.as_pointer()))
            stored.align = 2

        self._loop(zero, self.inputs, step, part)

    def _tile(self, first: Any, row: Any, output: Any, rows: int) -> None:
        """Compute a few rows of a few outputs."""
        write = self.write
        places = [write.add(row, self._number(r)) for r in range(rows)]
        outputs = [write.add(output, self._number(c)) for c in range(OUTPUTS)]
        xs = [write.gep(self.rounded, [write.mul(place, self.inputs)]) for place in places]
        weights = [write.gep(self.weight, [write.mul(own, self.inputs)]) for own in outputs]

        def added(start: Any, sums: Sequence[Any]) -> Sequence[Any]:
            numbers = [self._widened(x, start, _i16) for x in xs]
            own = [write.mul(w, x) for w in (self._widened(p, start, _i8) for p in weights) for x in numbers]
            after = []
            for total, products in zip(sums, own, strict=True):
                even = write.shuffle_vector(products, _undefined, _even)
                odd = write.shuffle_vector(products, _undefined, _odd)
                after.append(write.add(total, write.add(even, odd)))
            return after

        zeros = [ir.Constant(_integers, [0] * 8)] * (rows * OUTPUTS)
        sums = iter(self._loop(self._number(0), self.inputs, self._number(LANES), added, zeros))
        for own in outputs:
            scale = write.load(write.gep(self.terms, [own]))
            bias = write.load(write.gep(self.terms, [write.add(self.outputs, own)]))
            for place in places:
                total = write.sitofp(self._call("llvm.vector.reduce.add.v8i32", _i32, next(sums)), _f32)
                total = write.fmul(write.fmul(total, write.load(write.gep(self.scales, [place]))), scale)
                index = write.add(write.mul(write.add(first, place), self.outputs), own)
                write.store(write.fadd(total, bias), write.gep(self.result, [index]))

    def _widened(self, pointer: Any, start: Any, integer: ir.IntType) -> Any:
        values = self._load(self.write.gep(pointer, [start]), ir.VectorType(integer, LANES))
        return self.write.sext(values, _pairs)

    def _load(self, pointer: Any, vector: ir.VectorType) -> Any:
        loaded = self.write.load(self.write.bitcast(pointer, vector.as_pointer()))
        loaded.align = vector.element.width // 8 if isinstance(vector.element, ir.IntType) else 4
        return loaded

    def _spread(self, value: Any) -> Any:
        """Return a vector with this float in each place."""
        nothing = ir.Constant(_floats, ir.Undefined)
        one = self.write.insert_element(nothing, value, ir.Constant(_i32, 0))
        return self.write.shuffle_vector(one, nothing, ir.Constant(_integers, [0] * 8))

    def _call(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        known = self.module.globals.get(name)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.write.call(known, arguments)

    def _number(self, value: int) -> ir.Constant:
        return ir.Constant(_i64, value)

    def _loop(
        self,
        start: Any,
        end: Any,
        step: Any,
        body: Callable[[Any, Sequence[Any]], Sequence[Any] | None],
        carried: Sequence[Any] = (),
    ) -> Sequence[Any]:
        """Write a loop over `range(start, end, step)`; `body` gets the carried values, and returns the next ones."""
        write, before = self.write, self.write.block
        test, inside, after = (self.write.append_basic_block() for _ in range(3))
        write.branch(test)
        write.position_at_end(test)
        index, values = write.phi(_i64), [write.phi(value.type) for value in carried]
        condition = write.icmp_signed("<", index, end)
        write.cbranch(condition, inside, after)
        write.position_at_end(inside)
        following = [*(body(index, values) or ())]
        following.insert(0, write.add(index, step))
        for phi, first, later in zip([index, *values], [start, *carried], following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, write.block)
        write.branch(test)
        write.position_at_end(after)
        return values
