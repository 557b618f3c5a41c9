#pragma once

#include "store/core/participant.h"
#include "store/core/row_codec.h"

// What the row of a participant holds, for RowWriter and RowReader.
namespace resilient::store {

template <typename Archive>
void Fields(Archive& archive, Accusation& accusation) {
  archive(accusation.generation, accusation.reporter, accusation.text);
}

template <typename Archive>
void Fields(Archive& archive, Hold& hold) {
  archive(hold.limit, hold.reason);
}

template <typename Archive>
void Fields(Archive& archive, Participant& who) {
  archive(who.request);
  archive.Enum(who.state, ParticipantState::kSpare);
  archive(who.round, who.out, who.accusation, who.holder, who.wanted_size, who.hold, who.claim,
          who.fresh, who.since);
}

}  // namespace resilient::store
