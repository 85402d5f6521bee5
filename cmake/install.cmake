# cmake --install: the shared library, its headers, find_package(onepass), pkg-config, the command line.
include(CMakePackageConfigHelpers)

install(TARGETS onepass EXPORT onepass-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/onepass DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET onepass_cli)
  install(TARGETS onepass_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# The package has no dependencies, so the exported targets are all there is to find.
set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/onepass)
install(EXPORT onepass-targets NAMESPACE onepass:: FILE onepass-config.cmake DESTINATION ${config_folder})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/onepass-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/onepass-config-version.cmake DESTINATION ${config_folder})

# Relative to the .pc file, so that an installed tree can be moved.
file(RELATIVE_PATH ONEPASS_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" ONEPASS_PC_PREFIX ${ONEPASS_PC_PREFIX})
configure_file(cmake/onepass.pc.in onepass.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/onepass.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
