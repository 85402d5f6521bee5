# The CPU kernels: the same sources compiled once per instruction set, as -DONEPASS_ISA=<name>.
#   onepass_add_cpu_kernels(target)  sets ONEPASS_CPU_KERNEL_LIBRARIES and defines ONEPASS_X86 on `target`.
set(ONEPASS_ISA_FLAGS_portable "")
set(ONEPASS_ISA_FLAGS_avx2 -march=x86-64-v3)
set(ONEPASS_ISA_FLAGS_avx512 -march=x86-64-v4)
set(ONEPASS_ISA_FLAGS_avx512bf16 -march=x86-64-v4 -mavx512bf16)
# The scope of AMX tiles has a destructor; nothing throws across it.
set(ONEPASS_ISA_FLAGS_amx -march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16 -fno-exceptions)
set(ONEPASS_ISA_FLAGS_amx_emulated -march=x86-64-v4 -mavx512bf16 -DONEPASS_AMX_EMULATED=1)

# The bf16 files differ from the float32 ones: dot products of pairs, tiles.
set(ONEPASS_ISA_SOURCES_portable forward backward decode)
set(ONEPASS_ISA_SOURCES_avx2 forward backward decode)
set(ONEPASS_ISA_SOURCES_avx512 forward backward decode)
set(ONEPASS_ISA_SOURCES_avx512bf16 forward_bf16 backward_bf16 decode_bf16)
set(ONEPASS_ISA_SOURCES_amx forward_amx backward_amx decode_amx)
# The AMX kernels with tiles in plain C++: onepass_cpu_amx_emulated, for tests on machines without AMX.
set(ONEPASS_ISA_SOURCES_amx_emulated ${ONEPASS_ISA_SOURCES_amx})

# Unrolled tile loops with checks written into them take minutes to compile. So kernels call their address checks, and
# undefined behaviour is looked for in the portable ones, which are the same source.
function(onepass_sanitize_kernels target isa)
  if(ONEPASS_SANITIZE)
    target_compile_options(${target} PRIVATE -O1)
  endif()
  if(ONEPASS_SANITIZE MATCHES address)
    target_compile_options(${target} PRIVATE
      $<$<CXX_COMPILER_ID:GNU>:--param=asan-instrumentation-with-call-threshold=0>
      "$<$<CXX_COMPILER_ID:Clang>:SHELL:-mllvm -asan-instrumentation-with-call-threshold=0>")
  endif()
  if(ONEPASS_SANITIZE MATCHES undefined AND NOT isa STREQUAL portable)
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
  if(ONEPASS_FUZZ)
    target_compile_options(${target} PRIVATE -fno-sanitize=fuzzer-no-link)
  endif()
endfunction()

macro(onepass_add_cpu_kernels target)
  set(ONEPASS_CPU_KERNEL_LIBRARIES)
  set(isas portable)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64" AND NOT ONEPASS_PORTABLE)
    list(APPEND isas avx2 avx512 avx512bf16 amx)
    if(ONEPASS_TESTS)
      list(APPEND isas amx_emulated)
    endif()
    target_compile_definitions(${target} PUBLIC ONEPASS_X86=1)
  endif()
  foreach(isa IN LISTS isas)
    list(TRANSFORM ONEPASS_ISA_SOURCES_${isa} PREPEND src/cpu/ OUTPUT_VARIABLE sources)
    list(TRANSFORM sources APPEND .cc)
    set(present)
    foreach(source IN LISTS sources)
      if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${source})
        list(APPEND present ${source})
      endif()
    endforeach()
    if(present)
      add_library(onepass_cpu_${isa} OBJECT ${present})
      target_include_directories(onepass_cpu_${isa} PRIVATE include src)
      target_compile_definitions(onepass_cpu_${isa} PRIVATE ONEPASS_ISA=${isa} ONEPASS_ISA_${isa}=1)
      # Kernels are optimised in every build: a tile loop at -O0 takes minutes to test. They ask for fused operations by
      # name: a compiler that chose which sums to contract would choose differently in two loops that have to agree.
      target_compile_options(onepass_cpu_${isa} PRIVATE -O3 -fno-math-errno -fno-trapping-math
                             -ffp-contract=off ${ONEPASS_ISA_FLAGS_${isa}})
      # Clang halves 64-byte vectors unless told not to.
      if(isa MATCHES "avx512|amx")
        target_compile_options(onepass_cpu_${isa} PRIVATE $<$<CXX_COMPILER_ID:Clang>:-mprefer-vector-width=512>)
      endif()
      onepass_sanitize_kernels(onepass_cpu_${isa} ${isa})
      onepass_warnings(onepass_cpu_${isa})
      if(NOT isa STREQUAL amx_emulated)
        list(APPEND ONEPASS_CPU_KERNEL_LIBRARIES onepass_cpu_${isa})
      endif()
    endif()
  endforeach()
endmacro()
