"""Tables of mathematical functions: MLIR's, and those of CUDA's libdevice that C has.

A template names its operands `{0}`, `{1}`, ..., and a function of C's library as `c.NAME`, which is `NAMEf` in f32.
Directed rounding (`_rd`, `_ru`) has no counterpart and is left out; so are the inverse error functions.
"""

import re


def _words(text: str) -> list[str]:
    return text.split()


E4B15_DECODE, E4B15_ENCODE = "crossspec_from_e4b15", "crossspec_to_e4b15"
"""MLIR has no type for Triton's oldest float8: its conversions are calls, its values bytes."""

UNARY = _words("exp exp2 log log2 log10 log1p expm1 sqrt sin cos tan tanh sinh cosh asin acos atan asinh acosh atanh")
UNARY += _words("erf erfc floor ceil trunc cbrt rint nearbyint round tgamma lgamma logb j0 j1 y0 y1")
BINARY = ["pow", "atan2", "fmod", "copysign", "hypot", "nextafter", "remainder", "fdim"]

MATH = {name: name for name in _words("exp exp2 log log2 log10 log1p expm1 sqrt sin cos tan tanh sinh cosh asin acos")}
MATH |= {n: n for n in _words("atan asinh acosh atanh erf erfc floor ceil trunc cbrt round copysign atan2")}
MATH |= {"absf": "fabs", "powf": "pow", "roundeven": "rint"}

PROTOTYPES = dict.fromkeys([*UNARY, "fabs"], "T {}(T)") | dict.fromkeys(BINARY, "T {}(T, T)")
PROTOTYPES |= {"fma": "T {}(T, T, T)", "ldexp": "T {}(T, i32)", "ilogb": "i32 {}(T)"}
PROTOTYPES |= {"jn": "T {}(i32, T)", "yn": "T {}(i32, T)", "llrint": "i64 {}(T)", "llround": "i64 {}(T)"}

TEMPLATES = {name: f"c.{name}({{0}})" for name in [*UNARY, "fabs", "llrint", "llround", "ilogb"]}
TEMPLATES |= {name: f"c.{name}({{0}}, {{1}})" for name in [*BINARY, "ldexp", "jn", "yn"]}
TEMPLATES |= {
    "scalbn": "c.ldexp({0}, {1})",
    "fma": "c.fma({0}, {1}, {2})",
    "fma_rn": "c.fma({0}, {1}, {2})",
    "rsqrt": "1 / c.sqrt({0})",
    "rcbrt": "1 / c.cbrt({0})",
    "exp10": "c.pow(10, {0})",
    "powi": "c.pow({0}, {1})",
    "rhypot": "1 / c.hypot({0}, {1})",
    "norm3d": "c.hypot(c.hypot({0}, {1}), {2})",
    "rnorm3d": "1 / c.hypot(c.hypot({0}, {1}), {2})",
    "norm4d": "c.hypot(c.hypot({0}, {1}), c.hypot({2}, {3}))",
    "rnorm4d": "1 / c.hypot(c.hypot({0}, {1}), c.hypot({2}, {3}))",
    "normcdf": "(T)0.5 * c.erfc(-{0} * (T)0.7071067811865476)",
}
"""By the name without `__nv_` and, in f32, the `f` at its end."""

# The argument in quarter turns: what is left is at most an eighth of a turn. `k_` is 0 for a sine, 1 for a cosine.
_QUARTERS = (
    "({{{{ f64 r_ = c.fmod({{0}}, 2), n_ = c.rint(2 * r_), y_ = 3.141592653589793 * (r_ - n_ / 2); "
    "i32 k_ = f64_to_i32(n_) + {turn}; f64 v_ = k_ & 1 ? c.cos(y_) : c.sin(y_); k_ & 2 ? -v_ : v_; }}}})"
)
IN_F64 = {
    "sinpi": _QUARTERS.format(turn=0),
    "cospi": _QUARTERS.format(turn=1),
    # exp(x^2) with the part of x^2 that its rounding cuts off; a series where exp or erfc leave their range.
    "erfcx": (
        "({{ f64 x_ = {0}, q_ = x_ * x_; x_ > 12 ? erfcx_tail(x_) : x_ < -27 ? __builtin_inf() : "
        "c.exp(q_) * (1 + c.fma(x_, x_, -q_)) * c.erfc(x_); }})"
    ),
}
"""Computed in f64 for either type."""

_F32 = {
    "saturatef": "{0} > 0 ? {0} < 1 ? {0} : 1 : 0",
    "isnanf": "{0} != {0}",
    "isinff": "c.fabs({0}) == __builtin_inff()",
    "finitef": "c.fabs({0}) < __builtin_inff()",
    "signbitf": "BITCAST(u32, f32, {0}) >> 31",
    "frsqrt_rn": "1 / c.sqrt({0})",
    "fast_dividef": "{0} / {1}",
    "fast_fdividef": "{0} / {1}",
    "int_as_float": "BITCAST(f32, i32, {0})",
    "uint_as_float": "BITCAST(f32, i32, {0})",
    "float_as_int": "BITCAST(i32, f32, {0})",
    "float_as_uint": "BITCAST(i32, f32, {0})",
    "fdiv_rn": "{0} / {1}",
    "fadd_rn": "{0} + {1}",
    "fsub_rn": "{0} - {1}",
    "fmul_rn": "{0} * {1}",
    "frcp_rn": "1 / {0}",
    "fsqrt_rn": "c.sqrt({0})",
    "int2float_rn": "(f32){0}",
    "uint2float_rn": "(f32)(u32){0}",
    "ll2float_rn": "(f32){0}",
    "ull2float_rn": "(f32)(u64){0}",
}
_F32 |= {
    f"fast_{name}f": TEMPLATES[name] for name in ("sin", "cos", "tan", "exp", "log", "log2", "log10", "exp10", "pow")
}
_F64 = {
    "isnand": "{0} != {0}",
    "isinfd": "c.fabs({0}) == __builtin_inf()",
    "isfinited": "c.fabs({0}) < __builtin_inf()",
    "signbitd": "(i32)(BITCAST(u64, f64, {0}) >> 63)",
    "longlong_as_double": "BITCAST(f64, i64, {0})",
    "double_as_longlong": "BITCAST(i64, f64, {0})",
    "double2loint": "(i32)BITCAST(i64, f64, {0})",
    "double2hiint": "(i32)(BITCAST(i64, f64, {0}) >> 32)",
    "hiloint2double": "BITCAST(f64, u64, (u64)(u32){0} << 32 | (u32){1})",
    "ddiv_rn": "{0} / {1}",
    "dadd_rn": "{0} + {1}",
    "dsub_rn": "{0} - {1}",
    "dmul_rn": "{0} * {1}",
    "drcp_rn": "1 / {0}",
    "dsqrt_rn": "c.sqrt({0})",
    "double2float_rn": "(f32){0}",
    "double2float_rz": "f64_to_f32_rtz({0})",
    "int2double_rn": "(f64){0}",
    "uint2double_rn": "(f64)(u32){0}",
    "ll2double_rn": "(f64){0}",
    "ull2double_rn": "(f64)(u64){0}",
}
_ROUNDING = {"rn": "c.rint({0})", "rz": "{0}", "rd": "c.floor({0})", "ru": "c.ceil({0})"}
for _mode, _rounded in _ROUNDING.items():
    for _name, _through in {"int": "i32", "uint": "i64", "ll": "i64", "ull": "u64"}.items():
        _F32[f"float2{_name}_{_mode}"] = f"f32_to_{_through}({_rounded})"
        _F64[f"double2{_name}_{_mode}"] = f"f64_to_{_through}({_rounded})"
_INTEGER = {
    "clz": "clz_u32({0})",
    "clzll": "clz_u64({0})",
    "popc": "popc_u64((u32){0})",
    "popcll": "popc_u64({0})",
    "ffs": "{0} ? 32 - clz_u32({0} & -{0}) : 0",
    "ffsll": "{0} ? 64 - clz_u64({0} & -{0}) : 0",
    "brev": "brev_u32({0})",
    "brevll": "(i64)((u64)brev_u32((u32){0}) << 32 | brev_u32((u32)((u64){0} >> 32)))",
    "byte_perm": "byte_perm({0}, {1}, {2})",
    "mulhi": "(i32)(((i64){0} * {1}) >> 32)",
    "umulhi": "mulhi_u32({0}, {1})",
    "mul64hi": "mulhi_i64({0}, {1})",
    "umul64hi": "mulhi_u64({0}, {1})",
    "mul24": "(({0} << 8) >> 8) * (({1} << 8) >> 8)",
    "umul24": "({0} & 0xffffff) * ({1} & 0xffffff)",
    "sad": "({0} > {1} ? {0} - {1} : {1} - {0}) + {2}",
    "usad": "((u32){0} > (u32){1} ? {0} - {1} : {1} - {0}) + {2}",
    "abs": "{0} < 0 ? -{0} : {0}",
    "llabs": "{0} < 0 ? -{0} : {0}",
    "hadd": "(i32)(((i64){0} + {1}) >> 1)",
    "rhadd": "(i32)(((i64){0} + {1} + 1) >> 1)",
    "uhadd": "(i32)(((u64)(u32){0} + (u32){1}) >> 1)",
    "urhadd": "(i32)(((u64)(u32){0} + (u32){1} + 1) >> 1)",
}

LIBDEVICE: dict[str, tuple[str, str]] = {}
"""By symbol: the template and the type in which its library functions compute."""
for _name, _template in TEMPLATES.items():
    LIBDEVICE[f"__nv_{_name}"] = (_template, "f64")
    LIBDEVICE[f"__nv_{_name}f" if _name != "fma_rn" else "__nv_fmaf_rn"] = (_template, "f32")
LIBDEVICE |= {f"__nv_{name}{f}": (template, "f64") for name, template in IN_F64.items() for f in ("", "f")}
LIBDEVICE |= {f"__nv_{name}": (template, "f32") for name, template in (_F32 | _INTEGER).items()}
LIBDEVICE |= {f"__nv_{name}": (template, "f64") for name, template in _F64.items()}


def prototype(name: str, kind: str) -> tuple[str, str]:
    """A function of C's library in f32 or f64: its name there and its declaration."""
    full = name + "f" * (kind == "f32")
    return full, PROTOTYPES[name].format(full).replace("T", kind) + ";"


def expand(template: str, kind: str, declared: set[str]) -> str:
    """A template in C; declarations of what it calls are added to a set."""

    def named(found: re.Match[str]) -> str:
        name, declaration = prototype(found[1], kind)
        declared.add(declaration)
        return name

    return re.sub(r"\bc\.(\w+)", named, template).replace("(T)", f"({kind})")
