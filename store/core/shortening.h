#pragma once

#include <cstddef>

#include "store/core/messages.h"

namespace resilient::store {

// What is sent in place of a message of `bytes`, which no frame holds: to a request a refusal, of
// an event what of it fits. The last gate of what is sent, whatever peers have said: it never
// fails. Pure.
ServerMessage Shortened(const ServerMessage& message, std::size_t bytes);

}  // namespace resilient::store
