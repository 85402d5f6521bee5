# What holds for every target: sanitizers, the compiler cache, the library's exports.

find_program(ONEPASS_CCACHE ccache)
mark_as_advanced(ONEPASS_CCACHE)
if(ONEPASS_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${ONEPASS_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ONEPASS_CCACHE})
endif()

# nvcc through cmake/ptxas_log.py, which reads what ptxas says of each kernel.
if(ONEPASS_CUDA AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER python3 ${PROJECT_SOURCE_DIR}/cmake/ptxas_log.py)
  if(ONEPASS_CCACHE)
    list(APPEND CMAKE_CUDA_COMPILER_LAUNCHER ${ONEPASS_CCACHE})
  endif()
endif()

if(ONEPASS_SANITIZE)
  add_compile_options(-fsanitize=${ONEPASS_SANITIZE} -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ONEPASS_SANITIZE})
endif()
if(ONEPASS_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# The C functions and nothing else, also where the C++ runtime's templates would leak through default visibility.
function(onepass_export_only_c_symbols target)
  if(UNIX AND NOT APPLE)
    set(map ${PROJECT_SOURCE_DIR}/cmake/exports.map)
    target_link_options(${target} PRIVATE LINKER:--version-script=${map})
    set_target_properties(${target} PROPERTIES LINK_DEPENDS ${map})
  endif()
endfunction()
