#pragma once

#include <cstddef>
#include <deque>
#include <set>
#include <string>

namespace resilient {

// The nonces of hellos that were read, so that one which somebody has recorded on its way opens
// nothing when it is sent again. The oldest is forgotten for one too many: by then the link that it
// was for is up, and a second hello for it is refused. Pure. Owner: a group. Thread: loop-confined.
class SeenNonces {
 public:
  static constexpr std::size_t kMax = 4096;

  // False: it was seen before.
  bool Add(const std::string& nonce) {
    if (!seen_.insert(nonce).second) return false;
    order_.push_back(nonce);
    if (order_.size() > kMax) {
      seen_.erase(order_.front());
      order_.pop_front();
    }
    return true;
  }

 private:
  std::set<std::string> seen_;
  std::deque<std::string> order_;
};

}  // namespace resilient
