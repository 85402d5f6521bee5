/* DLPack's tensor descriptor, declared here so that onepass needs no other header.
 *
 * The layout is that of DLPack 0.2 to 1.x (https://dmlc.github.io/dlpack), so a DLTensor of any framework can be
 * passed as it is. A program that also uses <dlpack/dlpack.h> includes that one first; this file then adds nothing. */
#ifndef ONEPASS_DLPACK_H
#define ONEPASS_DLPACK_H

#include <stdint.h>

#ifndef DLPACK_DLPACK_H_

typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 } DLDeviceType;

typedef enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLOpaqueHandle = 3, kDLBfloat = 4 } DLDataTypeCode;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code; /* DLDataTypeCode */
  uint8_t bits;
  uint16_t lanes; /* 1 */
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;   /* ndim sizes */
  int64_t* strides; /* ndim strides in elements; NULL: compact, row-major */
  uint64_t byte_offset;
} DLTensor;

#endif /* DLPACK_DLPACK_H_ */
#endif /* ONEPASS_DLPACK_H */
