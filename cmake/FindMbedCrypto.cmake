# MbedCrypto::MbedCrypto: libmbedcrypto of Mbed TLS, as an archive, so that nothing has to be installed where the package runs
# and nothing meets another copy in the process.
find_path(MbedCrypto_INCLUDE_DIR mbedtls/md.h)
find_library(MbedCrypto_LIBRARY libmbedcrypto.a)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(MbedCrypto REQUIRED_VARS MbedCrypto_LIBRARY MbedCrypto_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install libmbedtls-dev, as \"./setup.sh packages build\" does")
if(MbedCrypto_FOUND AND NOT TARGET MbedCrypto::MbedCrypto)
  add_library(MbedCrypto::MbedCrypto STATIC IMPORTED)
  set_target_properties(MbedCrypto::MbedCrypto PROPERTIES
    IMPORTED_LOCATION "${MbedCrypto_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${MbedCrypto_INCLUDE_DIR}")
endif()
mark_as_advanced(MbedCrypto_INCLUDE_DIR MbedCrypto_LIBRARY)
