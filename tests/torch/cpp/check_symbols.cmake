# Goal: C++ programs can load libresilient_torch: it needs no Python, and brings no second libuv into
# the process of libtorch_cpu, which exports one. Method: its dynamic symbols and needed libraries.
foreach(tool NM READELF)
  if(NOT ${tool})
    message(FATAL_ERROR "the build knows no ${tool}")
  endif()
endforeach()

execute_process(COMMAND ${NM} -D --undefined-only ${LIBRARY} OUTPUT_VARIABLE undefined
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "U _?Py[A-Za-z_]+" python_symbols "${undefined}")
string(REGEX MATCHALL "U uv_[a-z_]+" uv_symbols "${undefined}")
if(python_symbols OR uv_symbols)
  message(FATAL_ERROR "undefined symbols of Python or libuv: ${python_symbols} ${uv_symbols}")
endif()

execute_process(COMMAND ${NM} -D -C --defined-only ${LIBRARY} OUTPUT_VARIABLE defined
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[A-Za-z] (google::protobuf|uv_)[^\n]*" foreign "${defined}")
if(foreign)
  message(FATAL_ERROR "exports symbols that are not ours: ${foreign}")
endif()
foreach(wanted init_process_group rebuild State::commit elastic)
  if(NOT defined MATCHES "resilient::${wanted}")
    message(FATAL_ERROR "resilient::${wanted} is not exported")
  endif()
endforeach()

execute_process(COMMAND ${READELF} -d ${LIBRARY} OUTPUT_VARIABLE dynamic COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "\\[lib(uv|python|torch_python|torch_cuda|nccl)[^]]*\\]" needed "${dynamic}")
if(needed)
  message(FATAL_ERROR "needs libraries that it must not need: ${needed}")
endif()
