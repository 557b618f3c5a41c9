#include "runtime/comm/nccl_control.h"

namespace resilient {

std::shared_ptr<NcclControl> NcclControl::Make(std::shared_ptr<Communicator> link,
                                               std::size_t bytes,
                                               std::shared_ptr<const Doorbell> doorbell) {
  return std::shared_ptr<NcclControl>(new NcclControl(std::move(link), bytes, std::move(doorbell)));
}

NcclControl::NcclControl(std::shared_ptr<Communicator> link, std::size_t bytes,
                         std::shared_ptr<const Doorbell> doorbell)
    : link_(std::move(link)), bytes_(bytes), doorbell_(std::move(doorbell)) {}

void NcclControl::Listen() {
  if (link_->size() > 1) Receive();
}

// One at a time: who wants to be heard again waits for the answer.
void NcclControl::Receive() {
  struct Place {
    std::string bytes;
    int from = -1;
  };
  auto place = std::make_shared<Place>();
  place->bytes.resize(bytes_);
  Operation op;
  op.kind = OpKind::kRecv;
  op.peer = kAnyPeer;
  op.data = place->bytes.data();
  op.count = bytes_;
  op.sender = &place->from;
  {
    const std::lock_guard lock(mutex_);
    listens_ = true;
  }
  const auto submitted =
      link_->Submit(std::move(op), [self = shared_from_this(), place](const Status& status) {
        {
          const std::lock_guard lock(self->mutex_);
          if (status.ok()) self->heard_.push_back({place->from, std::move(place->bytes)});
          self->listens_ = !status.ok();  // A link that has failed is not listened to again.
        }
        self->doorbell_->Ring();
      });
  (void)submitted;  // Refused: the group ends, by the same cause.
}

std::vector<NcclControl::Heard> NcclControl::Take() {
  std::vector<Heard> heard;
  bool again = false;
  {
    const std::lock_guard lock(mutex_);
    heard.swap(heard_);
    again = !heard.empty() && !listens_;
  }
  if (again) Receive();
  return heard;
}

bool NcclControl::Say(int peer, std::string bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (!busy_.insert(peer).second) return false;
  }
  const auto said = std::make_shared<std::string>(std::move(bytes));
  Operation op;
  op.kind = OpKind::kSend;
  op.peer = peer;
  op.data = said->data();
  op.count = said->size();
  const auto ended = [self = shared_from_this(), peer, said](const Status& status) {
    {
      const std::lock_guard lock(self->mutex_);
      self->busy_.erase(peer);
      if (status.code() == StatusCode::kLeft) self->left_.insert(peer);
    }
    self->doorbell_->Ring();
  };
  const auto submitted = link_->Submit(std::move(op), ended);
  if (!submitted.ok()) ended(submitted.status());
  return submitted.ok();
}

bool NcclControl::IsIdle() const {
  const std::lock_guard lock(mutex_);
  return busy_.empty();
}

std::vector<int> NcclControl::Left() const {
  const std::lock_guard lock(mutex_);
  return {left_.begin(), left_.end()};
}

}  // namespace resilient
