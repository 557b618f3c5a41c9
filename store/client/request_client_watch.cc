#include <memory>
#include <optional>
#include <utility>

#include "store/client/request_client.h"
#include "store/client/watch_cursor.h"

namespace resilient::store {

// A watch on the request connection: each step of its cursor is an operation of the client, so that
// the waiting caller drives the socket like any other, and what a lost connection leaves unanswered
// is asked again where it was. Owner: the caller of RequestClient::Watch. Thread: one at a time.
class WatchLine final : public KeyWatch {
 public:
  WatchLine(RequestClient& client, std::string prefix, std::uint64_t from_revision)
      : client_(client), cursor_(std::move(prefix), from_revision) {}

  Result<WatchBatch> Next(const Client::Call& call) override {
    const RequestClient::Ask ask{"watch", {&cursor_.prefix(), 1}};
    while (true) {
      Result<Reply> reply = client_.Perform(ask, cursor_.Next(), call);
      if (!reply.ok() && reply.status().code() != StatusCode::kCompacted) return reply.status();
      Reply answer;
      if (reply.ok()) {
        answer = std::move(*reply);
      } else {
        answer.status = reply.status();
      }
      Result<std::optional<WatchBatch>> batch = cursor_.OnReply(std::move(answer));
      if (!batch.ok()) return batch.status();
      if (*batch) return std::move(**batch);
    }
  }

 private:
  RequestClient& client_;
  WatchCursor cursor_;
};

std::unique_ptr<KeyWatch> RequestClient::Watch(std::string prefix, std::uint64_t from_revision) {
  return std::make_unique<WatchLine>(*this, std::move(prefix), from_revision);
}

}  // namespace resilient::store
