/* Functions of float without branches and calls, so that the compiler makes vector instructions of them. Relative errors
   below 3e-7 where results are normal numbers; NaN and infinities as in the C library. The polynomials are fits in the
   sense of the largest relative error. */

#ifdef __FP_FAST_FMAF
#define MADD(a, b, c) fmaf(a, b, c)
#else
#define MADD(a, b, c) ((a) * (b) + (c))
#endif

typedef union {
  float real;
  int32_t bits;
} Bits;

static inline float power_of_two(int32_t n) { return ((Bits){.bits = (n + 127) << 23}).real; }

static inline float exp_float(float x) {
  float bounded = x > 100.0f ? 100.0f : x < -110.0f ? -110.0f : x; /* the result is infinity, or 0 */
  float n = rintf(bounded * 0x1.715476p+0f);
  float r = MADD(n, -0x1.0bfbe8p-15f, MADD(n, -0x1.62ep-1f, bounded)); /* less n log 2, whose first part has few digits */
  float q = 0.001394111f;
  q = MADD(q, r, 0.008363175f);
  q = MADD(q, r, 0.041666374f);
  q = MADD(q, r, 0.16666576f);
  q = MADD(q, r, 0.5f);
  int32_t power = x != x ? 0 : (int32_t)n, half = power >> 1; /* in two steps, for 2 to it may be no number */
  return (MADD(q * r, r, r) + 1.0f) * power_of_two(half) * power_of_two(power - half);
}

static inline float sigmoid_float(float x) { return 1.0f / (1.0f + exp_float(-x)); }
static inline double sigmoid_double(double x) { return 1.0 / (1.0 + exp(-x)); }

static inline float tanh_float(float x) {
  float t = fabsf(x), s = x * x;
  float q = -0.0059422436f;
  q = MADD(q, s, 0.020889146f);
  q = MADD(q, s, -0.053827915f);
  q = MADD(q, s, 0.13332619f);
  q = MADD(q, s, -0.33333328f);
  float large = copysignf(1.0f - 2.0f / (exp_float(2.0f * t) + 1.0f), x);
  return t > 0.65f ? large : MADD(x * s, q, x);
}

static inline float erf_float(float x) {
  float t = fabsf(x), s = x * x;
  float q = -0.00059768936f;
  q = MADD(q, s, 0.00499098f);
  q = MADD(q, s, -0.026765566f);
  q = MADD(q, s, 0.112818025f);
  q = MADD(q, s, -0.37612495f);
  q = MADD(q, s, 0.12837915f);
  float u = t > 4.1f ? 4.1f : t; /* beyond it is 1 */
  float h = 1.0763351e-05f;
  h = MADD(h, u, -0.0003180614f);
  h = MADD(h, u, 0.0036229254f);
  h = MADD(h, u, -0.0237202f);
  h = MADD(h, u, 0.10618763f);
  h = MADD(h, u, 0.6351815f);
  h = MADD(h, u, 1.128641f);
  float large = copysignf(1.0f - exp_float(-u * h), x);
  return t > 0.93f ? large : MADD(x, q, x);
}
