/* Compiled into every kernel in front of its own code. No header is included: compiling them would take longer
   than compiling the kernel. Integer operations that C leaves undefined answer 0, as numpy does. */
typedef _Bool i1;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
typedef u64 ptr;
/* Narrow floats are kept as their bits. */
typedef u16 f16, bf16;
typedef u8 e4m3, e5m2, e4m3fnuz, e5m2fnuz;
#define INLINE static inline __attribute__((always_inline))
#define BITCAST(TO, FROM, x) ({ union { FROM from; TO to; } v_ = {(x)}; v_.to; })

int printf(const char *, ...);
int fflush(void *);

/* ---- What a program is told, and what it reports when it stops ---- */

struct extent { u64 low, high; };
struct report { i32 site, argument, program[3]; u64 address; };
struct context {
  int program[3], programs[3], fault;
  const struct extent *extents;
  struct report *report;
};

static __attribute__((noinline, cold, unused)) void fail(struct context *c, int site) {
  if (c->fault) return;
  c->fault = 1;
  c->report->site = site;
  for (int d = 0; d < 3; d++) c->report->program[d] = c->program[d];
}
/* It names the argument that is nearest of those that the pointer may come from (bit i is argument i). */
static __attribute__((noinline, cold, unused)) int out_of_bounds(struct context *c, ptr p, u64 arguments, int site) {
  if (!c->fault) {
    u64 least = ~0ull;
    c->report->address = p;
    for (int i = 63; i >= 0; i--)
      if (arguments >> i & 1) {
        struct extent e = c->extents[i];
        u64 far = p < e.low ? e.low - p : p < e.high ? 0 : p - e.high;
        if (far <= least) least = far, c->report->argument = i;
      }
  }
  fail(c, site);
  return 0;
}
/* Whether an access lies in one of the arguments of a set. */
INLINE int in_bounds(struct context *c, ptr p, u64 size, u64 arguments, int site) {
  for (int i = 0; arguments >> i; i++)
    if (arguments >> i & 1 && p >= c->extents[i].low && p + size <= c->extents[i].high) return 1;
  return out_of_bounds(c, p, arguments, site);
}

/* ---- Integers ---- */

#define INTEGERS(S, U, BITS)                                                                     \
  INLINE S div_##S(S a, S b) { return b == 0 ? 0 : b == -1 ? (S)-a : (S)(a / b); }               \
  INLINE S rem_##S(S a, S b) { return b == 0 || b == -1 ? 0 : (S)(a % b); }                      \
  INLINE U div_##U(U a, U b) { return b == 0 ? 0 : (U)(a / b); }                                 \
  INLINE U rem_##U(U a, U b) { return b == 0 ? 0 : (U)(a % b); }                                 \
  INLINE S floordiv_##S(S a, S b) { return (S)(div_##S(a, b) - (rem_##S(a, b) != 0 && (a < 0) != (b < 0))); } \
  INLINE S ceildiv_##S(S a, S b) { return (S)(div_##S(a, b) + (rem_##S(a, b) != 0 && (a < 0) == (b < 0))); } \
  INLINE U ceildiv_##U(U a, U b) { return (U)(div_##U(a, b) + (rem_##U(a, b) != 0)); }           \
  INLINE S shl_##S(S a, S b) { return (U)b < BITS ? (S)((U)a << b) : 0; }                        \
  INLINE S shr_##S(S a, S b) { return (S)(a >> ((U)b < BITS ? b : BITS - 1)); }                  \
  INLINE U shr_##U(U a, U b) { return b < BITS ? (U)(a >> b) : 0; }
/* How often a loop from `low` to below `high` runs; a step that is not positive ends it at once. */
#define STEPS(T, U) \
  INLINE u64 T##_steps(T low, T high, T step) { return low < high && step > 0 ? ((U)high - (U)low - 1) / (U)step + 1ull : 0; }
STEPS(i32, u32)
STEPS(i64, u64)
STEPS(u32, u32)
STEPS(u64, u64)
INTEGERS(i8, u8, 8)
INTEGERS(i16, u16, 16)
INTEGERS(i32, u32, 32)
INTEGERS(i64, u64, 64)
INLINE u32 mulhi_u32(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }
INLINE u64 mulhi_u64(u64 a, u64 b) { return (u64)(((unsigned __int128)a * b) >> 64); }
INLINE i64 mulhi_i64(i64 a, i64 b) { return (i64)(((__int128)a * b) >> 64); }
INLINE i32 clz_u32(u32 x) { return x ? __builtin_clz(x) : 32; }
INLINE i32 clz_u64(u64 x) { return x ? __builtin_clzll(x) : 64; }
INLINE i32 popc_u64(u64 x) { return __builtin_popcountll(x); }
INLINE u32 brev_u32(u32 x) {
  u32 y = 0;
  for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
  return y;
}
INLINE u32 byte_perm(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 y = 0;
  for (int i = 0; i < 4; i++) y |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return y;
}
/* An index from the end is negative, as in numpy; another out of range reads the first element. */
INLINE i64 gather_index(i64 i, i64 n) {
  i += i < 0 ? n : 0;
  return (u64)i < (u64)n ? i : 0;
}

/* ---- Floats to integers: what x86-64 answers where the integer cannot hold the number ---- */

#define TO_INTEGERS(F, BELOW)                                                                    \
  INLINE i32 F##_to_i32(F x) { return x > BELOW && x < (F)0x1p31 ? (i32)x : -2147483647 - 1; }   \
  INLINE i64 F##_to_i64(F x) {                                                                   \
    return x >= (F)-0x1p63 && x < (F)0x1p63 ? (i64)x : -9223372036854775807LL - 1;               \
  }                                                                                              \
  INLINE u64 F##_to_u64(F x) {                                                                   \
    if (x < (F)0x1p63) return (u64)F##_to_i64(x);                                                \
    return x < (F)0x1p64 ? (u64)(x - (F)0x1p63) + (1ull << 63) : x != x ? 1ull << 63 : 0; \
  }
TO_INTEGERS(f32, -0x1.000002p31f)
TO_INTEGERS(f64, -2147483649.0)

/* The f64 next to an integer whose last bit is odd unless it is exact: rounding it again rounds the integer. */
INLINE f64 u64_to_odd(u64 x) {
  return x >> 53 ? (f64)((x & ~2047ull) | (u64)((x & 2047) != 0) << 11) : (f64)x;
}
INLINE f64 i64_to_odd(i64 x) { return x < 0 ? -u64_to_odd(-(u64)x) : u64_to_odd((u64)x); }

/* ---- Narrow floats ---- */

/* Rounds to `m` bits of mantissa and a biased exponent: to the nearest, ties to even, or toward zero. What is above
   `largest` becomes `overflow`, or `largest` toward zero. `nan` is a NaN without its sign. */
INLINE u32 narrow(f64 x, int m, int bias, u32 largest, u32 overflow, u32 nan, int toward_zero) {
  u64 b = BITCAST(u64, f64, x);
  i64 e = (i64)(b >> 52 & 2047), f = (i64)(b & 0xfffffffffffffull);
  if (e == 2047) return f ? nan : overflow;
  if (e == 0) return 0;
  e += bias - 1023;
  i64 shift = 52 - m + (e <= 0 ? 1 - e : 0);
  if (shift > 60) shift = 60;
  f |= 1ll << 52;
  i64 q = f >> shift, rest = f & ((1ll << shift) - 1), half = 1ll << (shift - 1);
  if (!toward_zero) q += rest > half || (rest == half && (q & 1));
  q += e > 0 ? (e - 1) << m : 0;
  return q <= (i64)largest ? (u32)q : toward_zero ? largest : overflow;
}
INLINE f32 widen(u32 x, int m, int bias) {
  u32 e = x >> m, f = x & ((1u << m) - 1);
  f32 unit = BITCAST(f32, u32, (u32)(127 + 1 - bias - m) << 23);
  return e ? BITCAST(f32, u32, (e + 127 - bias) << 23 | f << (23 - m)) : f * unit;
}
INLINE u32 sign_f64(f64 x) { return (u32)(BITCAST(u64, f64, x) >> 63); }

/* Without a sign, and with one. The `fnuz` types have one zero, and a NaN where the other would be. */
#define NARROW(T, BITS, m, bias, largest, overflow, nan)                                         \
  INLINE T f64_to_##T(f64 x) {                                                                   \
    return (T)(narrow(x, m, bias, largest, overflow, nan, 0) | sign_f64(x) << (BITS - 1));       \
  }                                                                                              \
  INLINE T f64_to_##T##_rtz(f64 x) {                                                             \
    return (T)(narrow(x, m, bias, largest, overflow, nan, 1) | sign_f64(x) << (BITS - 1));       \
  }                                                                                              \
  INLINE T f32_to_##T##_rtz(f32 x) { return f64_to_##T##_rtz(x); }
#define FNUZ(T, m, bias)                                                                         \
  INLINE T f64_to_##T(f64 x) {                                                                   \
    u32 y = narrow(x, m, bias, 0x7f, 0x80, 0x80, 0);                                             \
    return (T)(y ? y | sign_f64(x) << 7 : 0);                                                    \
  }                                                                                              \
  INLINE T f64_to_##T##_rtz(f64 x) {                                                             \
    u32 y = narrow(x, m, bias, 0x7f, 0x80, 0x80, 1);                                             \
    return (T)(y ? y | sign_f64(x) << 7 : 0);                                                    \
  }                                                                                              \
  INLINE T f32_to_##T(f32 x) { return f64_to_##T(x); }                                           \
  INLINE T f32_to_##T##_rtz(f32 x) { return f64_to_##T##_rtz(x); }                               \
  INLINE f32 T##_to_f32(T x) {                                                                   \
    f32 y = widen(x & 0x7f, m, bias);                                                            \
    return x == 0x80 ? __builtin_nanf("") : x & 0x80 ? -y : y;                                   \
  }
NARROW(f16, 16, 10, 15, 0x7bff, 0x7c00, 0x7e00)
NARROW(bf16, 16, 7, 127, 0x7f7f, 0x7f80, 0x7fc0)
NARROW(e4m3, 8, 3, 7, 0x7e, 0x7e, 0x7f)
NARROW(e5m2, 8, 2, 15, 0x7b, 0x7c, 0x7f)
FNUZ(e4m3fnuz, 3, 8)
FNUZ(e5m2fnuz, 2, 16)
typedef u8 e4b15; /* no infinity and no NaN */
NARROW(e4b15, 8, 3, 15, 0x7f, 0x7f, 0x7f)
INLINE e4b15 f32_to_e4b15(f32 x) { return f64_to_e4b15(x); }
INLINE f32 e4b15_to_f32(u8 x) {
  f32 y = widen(x & 0x7f, 3, 15);
  return x & 0x80 ? -y : y;
}
INLINE e4m3 f32_to_e4m3(f32 x) { return f64_to_e4m3(x); }
INLINE e5m2 f32_to_e5m2(f32 x) { return f64_to_e5m2(x); }
INLINE f32 e4m3_to_f32(e4m3 x) {
  f32 y = (x & 0x7f) == 0x7f ? __builtin_nanf("") : widen(x & 0x7f, 3, 7);
  return x & 0x80 ? -y : y;
}

INLINE f32 bf16_to_f32(bf16 x) { return BITCAST(f32, u32, (u32)x << 16); }
INLINE bf16 f32_to_bf16(f32 x) {
  u32 b = BITCAST(u32, f32, x);
  return x != x ? 0x7fc0 : (bf16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
/* Elsewhere the C compiler would call a function that not every system has. */
#if defined __FLT16_MAX__ && (defined __F16C__ || defined __aarch64__)
INLINE f32 f16_to_f32(f16 x) { return (f32)BITCAST(_Float16, u16, x); }
INLINE f16 f32_to_f16(f32 x) { return BITCAST(u16, _Float16, (_Float16)x); }
#else
INLINE f32 f16_to_f32(f16 x) {
  u32 y = x & 0x7fff;
  f32 z = y >= 0x7c00 ? BITCAST(f32, u32, 0x7f800000 | (y & 0x3ff) << 13) : widen(y, 10, 15);
  return x & 0x8000 ? -z : z;
}
INLINE f16 f32_to_f16(f32 x) {
  u32 nan = 0x7e00 | (BITCAST(u32, f32, x) >> 13 & 0x3ff);
  return x != x ? (f16)(nan | (BITCAST(u32, f32, x) >> 31) << 15) : f64_to_f16(x);
}
#endif
INLINE f32 e5m2_to_f32(e5m2 x) { return f16_to_f32((f16)(x << 8)); }
INLINE f32 f64_to_f32_rtz(f64 x) {
  f32 y = (f32)x;
  f64 far = (f64)y < 0 ? -(f64)y : (f64)y, near = x < 0 ? -x : x;
  return far > near ? BITCAST(f32, u32, BITCAST(u32, f32, y) - 1) : y;
}

/* ---- Arithmetic ---- */

/* maxnum and minnum prefer the number to the NaN, maximum and minimum the NaN. */
#define FLOATS(F)                                                                                \
  INLINE F maxnum_##F(F a, F b) { return a > b || b != b ? a : b; }                              \
  INLINE F minnum_##F(F a, F b) { return a < b || b != b ? a : b; }                              \
  INLINE F maximum_##F(F a, F b) { return a > b || a != a ? a : b; }                             \
  INLINE F minimum_##F(F a, F b) { return a < b || a != a ? a : b; }
FLOATS(f32)
FLOATS(f64)

/* exp(x^2) erfc(x) of a large x: terms of its series down to 1e-16. */
INLINE f64 erfcx_tail(f64 x) {
  f64 t = 0.5 / x / x, s = 1;
  for (int k = 19; k > 0; k -= 2) s = 1 - k * t * s;
  return s / (x * 1.7724538509055160273);
}

/* The order in which numpy adds the numbers of a row, so that sums equal the interpreter's. */
#define SUM(T, F, NAME, GET)                                                                     \
  static __attribute__((unused)) F NAME(const T *a, i64 n) {                                     \
    if (n < 8) {                                                                                 \
      F s = GET(a[0]);                                                                           \
      for (i64 i = 1; i < n; i++) s += GET(a[i]);                                                \
      return s;                                                                                  \
    }                                                                                            \
    if (n > 128) {                                                                               \
      i64 h = n / 2;                                                                             \
      h -= h % 8;                                                                                \
      return NAME(a, h) + NAME(a + h, n - h);                                                    \
    }                                                                                            \
    F r[8];                                                                                      \
    i64 i = 8;                                                                                   \
    for (int k = 0; k < 8; k++) r[k] = GET(a[k]);                                                \
    for (; i < n - n % 8; i += 8)                                                                \
      for (int k = 0; k < 8; k++) r[k] += GET(a[i + k]);                                         \
    F s = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));                     \
    for (; i < n; i++) s += GET(a[i]);                                                           \
    return s;                                                                                    \
  }
#define SAME(x) (x)
SUM(f32, f32, sum_f32, SAME)
SUM(f64, f64, sum_f64, SAME)
SUM(f16, f32, sum_f16_as_f32, f16_to_f32)
INLINE f16 sum_f16(const f16 *a, i64 n) { return f32_to_f16(sum_f16_as_f32(a, n)); }
