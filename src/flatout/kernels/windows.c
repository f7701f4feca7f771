/* Windows of pictures in memory, some of them mirrored, as bytes or normalised: a batch at once.

Pixels have three bytes. A row of a window is copied, or turned round five pixels at a time; floats
are written past the caches, which a batch would fill several times before anybody reads it.
*/

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSSE3__)
#include <immintrin.h>
#endif

#define CHANNELS 3
#define MOST_SIDE 4096

enum { TOP, LEFT, HEIGHT, WIDTH, FLIP, COLUMNS };

static void turn_round(uint8_t *to, const uint8_t *from, int pixels) {
    int done = 0;
#if defined(__SSSE3__)
    /* Sixteen bytes are read for fifteen, from one before these: that one is inside the row. */
    const __m128i order = _mm_setr_epi8(13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, 0);
    for (; done + 6 <= pixels; done += 5) {
        const uint8_t *last = from + (ptrdiff_t)(pixels - done - 5) * CHANNELS;
        __m128i five = _mm_loadu_si128((const __m128i *)(last - 1));
        _mm_storeu_si128((__m128i *)(to + (ptrdiff_t)done * CHANNELS), _mm_shuffle_epi8(five, order));
    }
#endif
    for (; done < pixels; done++)
        memcpy(to + (ptrdiff_t)done * CHANNELS,
               from + (ptrdiff_t)(pixels - 1 - done) * CHANNELS, CHANNELS);
}

static void normalise(
    float *to, const uint8_t *from, const float *scale, const float *shift, int count) {
    int done = 0;
#if defined(__AVX2__)
    if ((uintptr_t)to % 32 == 0)
        for (; done + 8 <= count; done += 8) {
            __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + done)));
            __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_loadu_ps(scale + done));
            _mm256_stream_ps(to + done, _mm256_add_ps(_mm256_loadu_ps(shift + done), value));
        }
#endif
    for (; done < count; done++) to[done] = shift[done] + (float)from[done] * scale[done];
}

/* Cut `count` windows of `side` x `side` out of pictures of `sides[0]` x `sides[1]` (height, width)
that lie one after the other from `pictures` on: those at `places`, where `boxes` says, five numbers
a window. `scale` and `shift` are as long as a row, and make floats of `target`; without them it is
bytes. Return 0, or 1 if a window is not inside its picture. */
int cut_windows(
    const uint8_t *pictures, const int64_t *sides, const int64_t *places, const int64_t *boxes,
    int64_t count, int64_t side, const float *scale, const float *shift, void *target) {
    uint8_t turned[MOST_SIDE * CHANNELS + 16];
    const int64_t line = sides[1] * CHANNELS, row = side * CHANNELS;
    if (side < 1 || side > MOST_SIDE) return 1;
    for (int64_t number = 0; number < count; number++) {
        const int64_t *box = boxes + number * COLUMNS;
        if (box[TOP] < 0 || box[LEFT] < 0 || box[TOP] + side > sides[0] ||
            box[LEFT] + side > sides[1])
            return 1;
        const uint8_t *from =
            pictures + places[number] * sides[0] * line + box[TOP] * line + box[LEFT] * CHANNELS;
        for (int64_t y = 0; y < side; y++, from += line) {
            const int64_t at = (number * side + y) * row;
            const uint8_t *bytes = from;
            if (box[FLIP]) turn_round(turned, from, (int)side), bytes = turned;
            if (scale)
                normalise((float *)target + at, bytes, scale, shift, (int)row);
            else
                memcpy((uint8_t *)target + at, bytes, row);
        }
    }
#if defined(__AVX2__)
    _mm_sfence(); /* what was written past the caches is there for other threads */
#endif
    return 0;
}
