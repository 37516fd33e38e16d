/*
 * Strides in the encoding of a tensor's properties: what torch notes of a
 * tensor since 2.15. They say how it lay in memory, not how it is stored.
 *
 * They are behind all else, where they are known: one byte, DR_CONTIGUOUS,
 * where they are those of a contiguous tensor of the row's lengths, so that
 * rows of many shapes share their properties; else DR_STRIDED and a varint
 * for each dimension.
 */
#ifndef DCPRING_STRIDES_H
#define DCPRING_STRIDES_H

#include "plan/table.h"

enum dr_stride_kind { DR_NO_STRIDES, DR_CONTIGUOUS, DR_STRIDED };
enum { DR_MAX_STRIDES_BYTES = 1 + DR_VARINT_BYTES * DR_TABLE_MAX_DIMS };

/* Writes the strides of a tensor of these lengths to `out`, which has DR_MAX_STRIDES_BYTES; returns how many bytes. */
size_t dr_strides_encode(const int64_t *lengths, const int64_t *strides, int ndim, char *out);

/* What the properties of a row say. With DR_STRIDED `strides` has one for each of the row's dimensions. */
enum dr_stride_kind dr_row_strides(const struct dr_table *table, const struct dr_row *row,
                                   int64_t strides[DR_TABLE_MAX_DIMS]);

#endif
