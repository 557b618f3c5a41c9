# Finds a torch with C++ headers and defines an interface target for it. Used by this project's own
# build and, installed, by find_package(Resilient). Torch's CMake package is not used: it asks for the
# CUDA toolkit when torch was built with CUDA.
set(RESILIENT_TORCH_DIR "" CACHE PATH
    "Folder of torch with include/ and lib/; empty: the torch of the Python interpreter")

# Sets OUT to the folder, or to "" and OUT_why to what was looked at.
function(resilient_find_torch out)
  set(torch_dir "${RESILIENT_TORCH_DIR}")
  set(why "RESILIENT_TORCH_DIR=${torch_dir}")
  if(NOT torch_dir)
    if(NOT Python_EXECUTABLE)
      find_package(Python 3.10 QUIET COMPONENTS Interpreter)
    endif()
    set(why "Python: ${Python_EXECUTABLE}")
    if(Python_EXECUTABLE)
      execute_process(
        COMMAND ${Python_EXECUTABLE} -c
          "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
        OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
    endif()
  endif()
  if(NOT EXISTS "${torch_dir}/include/torch/csrc/distributed/c10d/Backend.hpp")
    set(torch_dir "")
  endif()
  set(${out} "${torch_dir}" PARENT_SCOPE)
  set(${out}_why "${why}" PARENT_SCOPE)
endfunction()

# "2.15" of the torch in that folder. The C++ ABI of torch moves with every minor.
function(resilient_torch_minor torch_dir out)
  file(GLOB headers "${torch_dir}/include/torch/headeronly/version.h"
       "${torch_dir}/include/torch/csrc/api/include/torch/version.h")
  set(text "")
  foreach(header IN LISTS headers)
    file(STRINGS "${header}" lines REGEX "define TORCH_VERSION_M(AJOR|INOR) ")
    string(APPEND text "${lines}")
  endforeach()
  string(REGEX REPLACE ".*TORCH_VERSION_MAJOR ([0-9]+).*" "\\1" major "${text}")
  string(REGEX REPLACE ".*TORCH_VERSION_MINOR ([0-9]+).*" "\\1" minor "${text}")
  set(${out} "${major}.${minor}" PARENT_SCOPE)
endfunction()

# An interface target with what a program on libtorch needs; further arguments as of add_library.
function(resilient_torch_target name torch_dir)
  add_library(${name} INTERFACE ${ARGN})
  # As system headers: their warnings are not ours.
  target_include_directories(${name} SYSTEM INTERFACE
    ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
  target_link_directories(${name} INTERFACE ${torch_dir}/lib)
  target_link_libraries(${name} INTERFACE torch_cpu c10)
  target_compile_definitions(${name} INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
  # libtorch_cpu needs CUDA libraries that its own RUNPATH finds; the linker would look for them as well.
  target_link_options(${name} INTERFACE -Wl,--allow-shlib-undefined)
endfunction()
