/* Decode a part of a JPEG with the library that Pillow itself decodes with.

Rows above the part are read but not transformed, rows below it are not read at all, and of the rows
between only the blocks around the part are made into pixels. The library smooths colours from one
column to the next, so that more than the part is asked for, where there is more.

Nothing is linked: the library that is loaded already is opened by its path, and asked whether it
has the structures below. Only what is used is named; the library says how large the whole is.
*/

#define _GNU_SOURCE
#include <dlfcn.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { RGB = 6, RGBX = 7 }; /* the library's numbers; Pillow keeps four bytes for a pixel */
#define ROWS 8 /* asked for at once */
#define MOST_BYTES 1024
#define MORE 16 /* columns on the right: very narrow parts are smoothed in another way */

/* Interface 6.2 of the library, which libjpeg-turbo keeps; checked by the library itself. */
enum { INTERFACE = 62, STRUCTURE_BYTES = 632 };

typedef struct {
    void (*fail)(void *);
    void (*warn)(void *, int);
    void (*show)(void *);
    void *rest[2];
    int code;
    char parameters[80];
    int trace;
    long warnings;
    char tail[64];
    jmp_buf out;
} errors;

typedef struct {
    errors *errors;
    void *memory, *progress, *client;
    int is_decompressor, state;
    void *source;
    uint32_t width, height;
    int components, colours, out_colours;
    uint32_t scale[2];
    double gamma;
    int options[4];
    int rest_of_options[8];
    uint32_t out_width, out_height;
    int out_components, out_bytes, rows_at_once, table_size;
    void *table;
    uint32_t row;
    char rest[MOST_BYTES];
} decoder;

static errors *(*standard_errors)(errors *);
static void (*create)(decoder *, int, size_t);
static void (*read_memory)(decoder *, const uint8_t *, unsigned long);
static int (*read_header)(decoder *, int);
static int (*start)(decoder *);
static void (*crop)(decoder *, uint32_t *, uint32_t *);
static uint32_t (*skip)(decoder *, uint32_t);
static uint32_t (*read_rows)(decoder *, uint8_t **, uint32_t);
static void (*destroy)(decoder *);

static void leave(void *it) { longjmp(((decoder *)it)->errors->out, 1); }

static void count(void *it, int level) {
    if (level < 0) ((decoder *)it)->errors->warnings++;
}

static void show_nothing(void *it) { (void)it; }

static void begin(decoder *it, errors *found) {
    memset(it, 0, sizeof(*it));
    it->errors = standard_errors(found);
    found->fail = leave;
    found->warn = count;
    found->show = show_nothing;
}

/* Find the functions in the library at this path; return 0 if it is one that is understood. */
int open_library(const char *path) {
    static const char *names[] = {
        "jpeg_std_error",     "jpeg_CreateDecompress", "jpeg_mem_src",
        "jpeg_read_header",   "jpeg_start_decompress", "jpeg_crop_scanline",
        "jpeg_skip_scanlines", "jpeg_read_scanlines",  "jpeg_destroy_decompress",
    };
    void **places[] = {
        (void **)&standard_errors, (void **)&create, (void **)&read_memory,
        (void **)&read_header,     (void **)&start,  (void **)&crop,
        (void **)&skip,            (void **)&read_rows, (void **)&destroy,
    };
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return 1;
    for (size_t number = 0; number < sizeof(names) / sizeof(*names); number++) {
        *places[number] = dlsym(library, names[number]);
        if (!*places[number]) return 2;
    }
    decoder it;
    errors found;
    begin(&it, &found);
    if (setjmp(found.out)) return 3; /* another interface, or structures of another size */
    create(&it, INTERFACE, STRUCTURE_BYTES);
    destroy(&it);
    return 0;
}

/* Decode rows `box[1]` to `box[3]` and columns `box[0]` to `box[2]`, ends not included, into their
places of `pixels`, which has `sides[0]` times `sides[1]` pixels of `bytes`, three or four; return 0
if all went well. Other pixels of these rows may be overwritten. All is counted in the pixels of the
picture that is `shrink` times smaller: 1, 2, 4 or 8. */
int decode_region(
    const uint8_t *data, unsigned long size, const int *sides, const int *box, uint8_t *pixels,
    int bytes, int shrink) {
    decoder it;
    errors found;
    begin(&it, &found);
    if (setjmp(found.out)) {
        destroy(&it);
        return 1;
    }
    create(&it, INTERFACE, STRUCTURE_BYTES);
    read_memory(&it, data, size);
    read_header(&it, 1);
    it.scale[0] = 1;
    it.scale[1] = shrink;
    it.out_colours = bytes == 3 ? RGB : RGBX;
    start(&it);
    if ((int)it.out_width != sides[0] || (int)it.out_height != sides[1] || it.out_bytes != bytes) {
        destroy(&it);
        return 2;
    }
    int first = box[0] - 1, end = box[2] + MORE < sides[0] ? box[2] + MORE : sides[0];
    if (end - first < 2 * MORE) first = end - 2 * MORE;
    uint32_t left = first > 0 ? first : 0, wide = end - left;
    if (wide < it.out_width) crop(&it, &left, &wide); /* moves left to where a block begins */
    if (box[1] > 0) skip(&it, box[1]);
    const size_t line = (size_t)sides[0] * bytes;
    while ((int)it.row < box[3]) {
        uint8_t *rows[ROWS];
        int wanted = box[3] - (int)it.row;
        if (wanted > ROWS) wanted = ROWS;
        for (int number = 0; number < wanted; number++)
            rows[number] = pixels + (it.row + number) * line + (size_t)left * bytes;
        if (!read_rows(&it, rows, wanted)) break;
    }
    int is_whole = (int)it.row >= box[3] && !found.warnings;
    destroy(&it);
    return is_whole ? 0 : 3;
}
