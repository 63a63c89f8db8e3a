/* The operators of a decoding step, besides matrix products. Plain C99, without a library. */

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* e^x for x <= 0, to about one unit in the last place (Cephes, expf): small enough to be vectorised. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float whole = (float)(int32_t)(x * 1.44269504f - 0.5f);
    const float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return sum * power;
}

INLINE float inverse_root(float x) {
    /* Three steps of Newton from the usual first guess are exact to a float's last digits. */
    int32_t bits;
    memcpy(&bits, &x, 4);
    bits = 0x5f3759df - (bits >> 1);
    float y;
    memcpy(&y, &bits, 4);
    for (int step = 0; step < 4; step++) y = y * (1.5f - 0.5f * x * y * y);
    return y;
}

INLINE float root_mean_square_inverse(const float *x, int64_t width, float epsilon) {
    float sum = 0;
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    return inverse_root(sum / width + epsilon);
}

/* out = x / rms(x) * weight, for (rows, width). */
void turnwise_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; row++, x += width, out += width) {
        const float factor = root_mean_square_inverse(x, width, epsilon);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
    }
}

/* out = silu(gate) * up, for (rows, 2 width) with the gate before up, and (rows, width). */
void turnwise_gate(const float *gate_up, float *out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * width, out += width)
        for (int64_t i = 0; i < width; i++) {
            const float x = gate_up[i], e = exponential(x < 0 ? x : -x);
            out[i] = x * (x < 0 ? e : 1.0f) / (1.0f + e) * gate_up[width + i];
        }
}

INLINE void rotate_head(float *x, const float *weight, const float *cosine, const float *sine, int64_t depth,
                        float epsilon) {
    const int64_t half = depth / 2;
    if (weight) {
        const float factor = root_mean_square_inverse(x, depth, epsilon);
        for (int64_t i = 0; i < depth; i++) x[i] *= factor * weight[i];
    }
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] + b * sine[i];
        x[half + i] = b * cosine[half + i] + a * sine[half + i];
    }
}

/*
 * Normalise the first `keyed` heads, unless `weight` is null, and rotate them by their positions, in place.
 *
 * qkv: (rows, all, depth). weight: (keyed, depth). cosine, sine: (positions, depth), the sign in the first half of sine.
 */
void turnwise_rotate(float *qkv, const float *weight, const float *cosine, const float *sine, const int64_t *positions,
                     int64_t rows, int64_t all, int64_t keyed, int64_t depth, float epsilon) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < keyed; head++) {
            float *x = qkv + (row * all + head) * depth;
            const float *own = weight ? weight + head * depth : 0;
            const int64_t place = positions[row] * depth;
            if (depth == 64) rotate_head(x, own, cosine + place, sine + place, 64, epsilon);
            else if (depth == 128) rotate_head(x, own, cosine + place, sine + place, 128, epsilon);
            else rotate_head(x, own, cosine + place, sine + place, depth, epsilon);
        }
}

/* One row. `depth` is a constant where this is inlined, so that the inner loops are unrolled. */
INLINE void attend_row(const float *query, const float *keys, const float *values, float *out, float *scores,
                       int64_t length, int64_t heads, int64_t groups, int64_t depth, float scale) {
    const int64_t width = groups * depth, shared = heads / groups;
    for (int64_t token = 0; token < length; token++)
        for (int64_t head = 0; head < heads; head++) {
            const float *q = query + head * depth, *k = keys + token * width + head / shared * depth;
            float sum = 0;
            for (int64_t i = 0; i < depth; i++) sum += q[i] * k[i];
            scores[head * length + token] = sum * scale;
        }
    for (int64_t head = 0; head < heads; head++) {
        float *own = scores + head * length, highest = own[0], total = 0;
        for (int64_t i = 0; i < length; i++) highest = own[i] > highest ? own[i] : highest;
        for (int64_t i = 0; i < length; i++) own[i] = exponential(own[i] - highest);
        for (int64_t i = 0; i < length; i++) total += own[i];
        for (int64_t i = 0; i < length; i++) own[i] /= total;
    }
    memset(out, 0, sizeof(float) * heads * depth);
    for (int64_t token = 0; token < length; token++)
        for (int64_t head = 0; head < heads; head++) {
            const float weight = scores[head * length + token];
            const float *v = values + token * width + head / shared * depth;
            float *sum = out + head * depth;
            for (int64_t i = 0; i < depth; i++) sum[i] += weight * v[i];
        }
}

/*
 * Write the keys and values of each row's new token, and attend to all tokens of the row.
 *
 * qkv: (rows, heads + 2 groups, depth) projections of the new tokens.
 * data: (rows, 2, capacity, groups, depth), keys before values.
 * out: (rows, heads, depth).
 * positions: (rows) tokens of each row before the new one.
 * scores: heads * (longest row + 1) floats of memory to work in.
 */
void turnwise_attend(const float *qkv, float *data, float *out, const int64_t *positions, float *scores, int64_t rows,
                     int64_t capacity, int64_t heads, int64_t groups, int64_t depth, float scale) {
    const int64_t width = groups * depth;
    for (int64_t row = 0; row < rows; row++) {
        const float *query = qkv + row * (heads + 2 * groups) * depth;
        float *keys = data + row * 2 * capacity * width, *values = keys + capacity * width;
        float *result = out + row * heads * depth;
        const int64_t before = positions[row], length = before + 1;
        memcpy(keys + before * width, query + heads * depth, sizeof(float) * width);
        memcpy(values + before * width, query + (heads + groups) * depth, sizeof(float) * width);
        if (depth == 64) attend_row(query, keys, values, result, scores, length, heads, groups, 64, scale);
        else if (depth == 128) attend_row(query, keys, values, result, scores, length, heads, groups, 128, scale);
        else attend_row(query, keys, values, result, scores, length, heads, groups, depth, scale);
    }
}
