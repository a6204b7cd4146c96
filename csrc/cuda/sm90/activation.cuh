// The gates of GatedForm (mok_compile/activation.py): values and derivatives in float32.
#pragma once

#include "arguments.h"

namespace mok::sm90 {

struct Derivatives {
  float value, dgate, dup;
};

// kPlainSilu: silu without limits or offset, the common gate, free of run-time choices.
template <bool kPlainSilu>
struct Gate {
  const Activation& form;

  // Two approximate instructions without their guards: e^-x may become infinite or zero, and the result is then right.
  static __device__ __forceinline__ float sigmoid(float x) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
  }

  // NaN passes through, as in torch.
  static __device__ __forceinline__ float clamp(float x, float low, float high) {
    return x < low ? low : x > high ? high : x;
  }

  __device__ __forceinline__ float factor(float x) const {
    if (kPlainSilu) return x * sigmoid(x);
    switch (form.kind) {
      case Activation::kSilu:
        return x * sigmoid(x);
      case Activation::kGelu:
        return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
      case Activation::kGeluTanh:
        return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
      case Activation::kRelu:
        return x < 0.0f ? 0.0f : x;
      case Activation::kRelu2:
        return x < 0.0f ? 0.0f : x * x;
      case Activation::kSigmoid:
        return sigmoid(x);
      case Activation::kSwish:
        return x * sigmoid(form.alpha * x);
      default:
        return x;
    }
  }

  // {value, derivative} of the nonlinear factor.
  __device__ __forceinline__ float2 factor_derivative(float x) const {
    if (kPlainSilu || form.kind == Activation::kSilu || form.kind == Activation::kSwish) {
      const float alpha = kPlainSilu || form.kind == Activation::kSilu ? 1.0f : form.alpha;
      const float s = sigmoid(alpha * x);
      return make_float2(x * s, s * (1.0f + alpha * x * (1.0f - s)));
    }
    switch (form.kind) {
      case Activation::kGelu: {
        const float cdf = 0.5f * (1.0f + erff(x * 0.70710678118654752f));
        return make_float2(x * cdf, cdf + x * __expf(-0.5f * x * x) * 0.39894228040143268f);
      }
      case Activation::kGeluTanh: {
        const float t = tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x));
        const float slope = 0.79788456080286536f * (1.0f + 0.134145f * x * x);
        return make_float2(0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope);
      }
      case Activation::kRelu:
        return make_float2(x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f);
      case Activation::kRelu2:
        return make_float2(x < 0.0f ? 0.0f : x * x, x > 0.0f ? 2.0f * x : 0.0f);
      case Activation::kSigmoid: {
        const float s = sigmoid(x);
        return make_float2(s, s * (1.0f - s));
      }
      default:
        return make_float2(x, 1.0f);
    }
  }

  __device__ __forceinline__ float value(float gate, float up) const {
    if (kPlainSilu) return factor(gate) * up;
    const float x = form.swapped ? up : gate, u = form.swapped ? gate : up;
    return factor(clamp(x, form.gate_min, form.gate_max)) * (clamp(u, form.up_min, form.up_max) + form.up_offset);
  }

  __device__ __forceinline__ Derivatives derivatives(float gate, float up) const {
    if (kPlainSilu) {
      const float2 f = factor_derivative(gate);
      return {f.x * up, f.y * up, f.x};
    }
    const float x = form.swapped ? up : gate, u = form.swapped ? gate : up;
    const float2 f = factor_derivative(clamp(x, form.gate_min, form.gate_max));
    const float linear = clamp(u, form.up_min, form.up_max) + form.up_offset;
    const float dx = x >= form.gate_min && x <= form.gate_max ? f.y * linear : 0.0f;
    const float du = u >= form.up_min && u <= form.up_max ? f.x : 0.0f;
    return {f.x * linear, form.swapped ? du : dx, form.swapped ? dx : du};
  }

  // Ungated experts: the nonlinear factor of `up` alone.
  __device__ __forceinline__ float value(float up) const { return factor(clamp(up, form.gate_min, form.gate_max)); }

  __device__ __forceinline__ Derivatives derivatives(float up) const {
    const float2 f = factor_derivative(clamp(up, form.gate_min, form.gate_max));
    return {f.x, 0.0f, up >= form.gate_min && up <= form.gate_max ? f.y : 0.0f};
  }
};

}  // namespace mok::sm90
