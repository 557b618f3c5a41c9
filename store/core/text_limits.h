#pragma once

#include "store/core/messages.h"

namespace resilient::store {

// Cuts the texts that a peer sends for people to read, and the names in them, each to the length
// that its field has; so whatever is made of them has a bound. Texts that stand for something
// (keys, jobs, sessions) are none of these: they are refused where they are too long. Each request
// goes through it before anything else of the core sees it. Pure.
void CutTexts(Op& op);

// `status` with its message and the names in its detail cut likewise.
Status CutTexts(const Status& status);

}  // namespace resilient::store
