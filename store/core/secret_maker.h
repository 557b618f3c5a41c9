#pragma once

#include <functional>
#include <string>

namespace resilient::store {

// Makes the secrets of worlds and of their views, by which members recognise each other. A secret
// cannot be guessed from other secrets: a server takes each from the kernel.
using SecretMaker = std::function<std::string()>;

}  // namespace resilient::store
