/* Pillow's own resampling of 8-bit colour images, with vector instructions.

The same weights, the same fixed point and the same rounding as Pillow's Resample.c: a sum of
integers does not depend on the order of its terms, so the bytes are the same. What differs is that
the four channels of two pixels are one vector, and that the caller holds no interpreter lock.

Pixels have four bytes, of which the last is written as 0, as Pillow does for RGB.
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PI 3.14159265358979323846
#define BITS 22 /* of a weight's fraction: 32 less 8 of a byte and 2 for sums beyond it */

typedef int32_t words __attribute__((vector_size(32)));
typedef uint8_t bytes __attribute__((vector_size(8)));

enum { LANCZOS = 1, BILINEAR = 2, BICUBIC = 3, BOX = 4, HAMMING = 5 }; /* Pillow's numbers */

static double sinc(double x) {
    if (x == 0.0) return 1.0;
    x = x * PI;
    return sin(x) / x;
}

static double weight_of(int kind, double x) {
    if (kind == BOX) return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    if (kind == LANCZOS) return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
    if (x < 0.0) x = -x;
    if (kind == BILINEAR) return x < 1.0 ? 1.0 - x : 0.0;
    if (kind == HAMMING) {
        if (x == 0.0) return 1.0;
        if (x >= 1.0) return 0.0;
        x = x * PI;
        return sin(x) / x * (0.54 + 0.46 * cos(x));
    }
    const double a = -0.5;
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
    return 0.0;
}

static double support_of(int kind) {
    const double found[] = {0.0, 3.0, 1.0, 2.0, 0.5, 1.0};
    return found[kind];
}

/* The taps of each place of one side. */
typedef struct {
    int count;
    int *first;
    int *taps;
    int32_t *weights;
} side;

static void free_side(side *it) {
    free(it->first);
    free(it->taps);
    free(it->weights);
}

static int make_side(side *it, int from, float low, float high, int to, int kind) {
    double scale = (double)(high - low) / to; /* the difference of two floats, as in Pillow */
    double wide = scale < 1.0 ? 1.0 : scale;
    double support = support_of(kind) * wide;
    it->count = (int)ceil(support) * 2 + 1;
    it->first = malloc(sizeof(int) * to);
    it->taps = malloc(sizeof(int) * to);
    it->weights = calloc((size_t)to * it->count, sizeof(int32_t));
    double *own = malloc(sizeof(double) * it->count);
    if (!it->first || !it->taps || !it->weights || !own) {
        free(own);
        free_side(it);
        return 0;
    }
    for (int place = 0; place < to; place++) {
        double center = low + (place + 0.5) * scale;
        double sum = 0.0, step = 1.0 / wide; /* one for all, as the sum is */
        int first = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
        if (first < 0) first = 0;
        if (end > from) end = from;
        it->first[place] = first;
        it->taps[place] = end - first;
        for (int tap = 0; tap < it->taps[place]; tap++) {
            own[tap] = weight_of(kind, (tap + it->first[place] - center + 0.5) * step);
            sum += own[tap];
        }
        for (int tap = 0; tap < it->taps[place]; tap++) {
            if (sum != 0.0) own[tap] /= sum;
            double fixed = own[tap] * (1 << BITS);
            it->weights[place * it->count + tap] = (int)(own[tap] < 0 ? -0.5 + fixed : 0.5 + fixed);
        }
    }
    free(own);
    return 1;
}

static inline words wide(bytes eight) {
#if defined(__AVX2__)
    return (words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)eight));
#else
    return __builtin_convertvector(eight, words);
#endif
}

static inline words widened(const uint8_t *one, const uint8_t *other) {
    uint32_t low, high;
    memcpy(&low, one, 4);
    memcpy(&high, other, 4);
    const uint64_t both = low | (uint64_t)high << 32;
    return wide((bytes)both);
}

static inline bytes narrowed(words sum) {
    const words colours = {255, 255, 255, 0, 255, 255, 255, 0};
    sum >>= BITS;
    sum &= sum >= 0;
    sum = (sum | (sum > 255)) & colours;
#if defined(__AVX2__)
    __m256i small = _mm256_packus_epi32((__m256i)sum, (__m256i)sum);
    small = _mm256_packus_epi16(small, small);
    const uint64_t low = (uint32_t)_mm256_extract_epi32(small, 0);
    return (bytes)(low | (uint64_t)(uint32_t)_mm256_extract_epi32(small, 4) << 32);
#else
    return __builtin_convertvector(sum, bytes);
#endif
}

/* Two rows at a time: their pixels at one place have the same weights. */
static void across(const uint8_t *one, const uint8_t *other, uint8_t *to, uint8_t *to_other,
                   const side *it, int width) {
    const words half = (words){0} + (1 << (BITS - 1));
    for (int x = 0; x < width; x++) {
        const int32_t *weights = it->weights + (size_t)x * it->count;
        const uint8_t *a = one + 4 * (size_t)it->first[x], *b = other + 4 * (size_t)it->first[x];
        words sum = half;
        for (int tap = 0; tap < it->taps[x]; tap++)
            sum += widened(a + 4 * tap, b + 4 * tap) * weights[tap];
        bytes made = narrowed(sum);
        memcpy(to + 4 * (size_t)x, &made, 4);
        memcpy(to_other + 4 * (size_t)x, (char *)&made + 4, 4);
    }
}

static void down(const uint8_t *from, uint8_t *to, size_t pitch, const int32_t *weights, int taps) {
    const words half = (words){0} + (1 << (BITS - 1));
    size_t at = 0;
    for (; at + 32 <= pitch; at += 32) {
        words sums[4] = {half, half, half, half};
        for (int tap = 0; tap < taps; tap++) {
            const uint8_t *row = from + tap * pitch + at;
            for (int part = 0; part < 4; part++) {
                bytes eight;
                memcpy(&eight, row + 8 * part, 8);
                sums[part] += wide(eight) * weights[tap];
            }
        }
        for (int part = 0; part < 4; part++) {
            bytes made = narrowed(sums[part]);
            memcpy(to + at + 8 * part, &made, 8);
        }
    }
    for (; at < pitch; at += 4) {
        words sum = half;
        for (int tap = 0; tap < taps; tap++) {
            const uint8_t *pixel = from + tap * pitch + at;
            sum += widened(pixel, pixel) * weights[tap];
        }
        bytes made = narrowed(sum);
        memcpy(to + at, &made, 4);
    }
}

/* One pass over the rows `first` to `end`, or over all columns. */
static void pass_across(const uint8_t *from, int width, uint8_t *to, const side *it, int to_width,
                        int first, int end) {
    size_t pitch = 4 * (size_t)to_width, source = 4 * (size_t)width;
    for (int row = first; row < end; row += 2) {
        int other = row + 1 < end ? row + 1 : row;
        across(from + row * source, from + other * source, to + (row - first) * pitch,
               to + (other - first) * pitch, it, to_width);
    }
}

static void pass_down(const uint8_t *from, int skipped, size_t pitch, uint8_t *to, const side *it,
                      int to_height) {
    for (int row = 0; row < to_height; row++)
        down(from + (it->first[row] - skipped) * pitch, to + row * pitch, pitch,
             it->weights + (size_t)row * it->count, it->taps[row]);
}

static int both_passes(const uint8_t *from, int width, uint8_t *to, int to_width, int to_height,
                       const side *x, const side *y, int is_down_first) {
    int first = y->first[0], end = y->first[to_height - 1] + y->taps[to_height - 1];
    size_t size = 4 * (size_t)(is_down_first ? width : to_width);
    uint8_t *between = malloc(size * (is_down_first ? to_height : end - first));
    if (!between) return 1;
    if (is_down_first) {
        pass_down(from, 0, size, between, y, to_height);
        pass_across(between, width, to, x, to_width, 0, to_height);
    } else {
        pass_across(from, width, between, x, to_width, first, end);
        pass_down(between, first, size, to, y, to_height);
    }
    free(between);
    return 0;
}

/* Resample `from`, width x height pixels, to `to`; 0 on success.

`box` is left, top, right and bottom in pixels of the source, as Pillow rounds them: to floats. The
order of the two passes shows in the bytes, because each rounds; it is the caller's to know. */
int resample(const uint8_t *from, const int *size, uint8_t *to, const int *to_size,
             const float *box, int kind, int is_down_first) {
    const int width = size[0], height = size[1], to_width = to_size[0], to_height = to_size[1];
    const int is_across = to_width != width || box[0] || box[2] != to_width;
    const int is_down = to_height != height || box[1] || box[3] != to_height;
    if (!is_across && !is_down) return 1;
    side x, y;
    if (!make_side(&x, width, box[0], box[2], to_width, kind)) return 1;
    if (!make_side(&y, height, box[1], box[3], to_height, kind)) {
        free_side(&x);
        return 1;
    }
    int trouble = 0;
    if (is_across && is_down)
        trouble = both_passes(from, width, to, to_width, to_height, &x, &y, is_down_first);
    else if (is_across)
        pass_across(from, width, to, &x, to_width, 0, height);
    else
        pass_down(from, 0, 4 * (size_t)width, to, &y, to_height);
    free_side(&x);
    free_side(&y);
    return trouble;
}
