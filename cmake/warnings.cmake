# Warnings for our own targets; errors in development builds.
function(onepass_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wnon-virtual-dtor
    $<$<BOOL:${ONEPASS_DEV}>:-Werror>
    # GCC 12 sees uninitialised use inside its own AVX-512 intrinsics.
    "$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-uninitialized>")
endfunction()
