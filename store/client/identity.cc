#include "store/client/identity.h"

#include <string>

#include <resilient/per_process.h>

#include "runtime/base/process.h"
#include "runtime/base/random.h"

namespace resilient::store {
namespace {

struct Incarnation {
  const std::string id = RandomHexId();
};
constinit PerProcess<Incarnation> incarnation;

}  // namespace

std::string NewSessionId() { return RandomHexId(); }

std::string ThisIncarnation() { return incarnation.Get().id; }

Hello MakeHello(const ConnectOptions& options, Role role) {
  Hello hello;
  hello.job = options.job;
  hello.session = options.session.empty() ? NewSessionId() : options.session;
  hello.incarnation = options.incarnation.empty() ? ThisIncarnation() : options.incarnation;
  hello.role = role;
  hello.process = ThisProcess();
  hello.launcher_attempt = options.launcher_attempt;
  hello.supervised = options.supervised;
  hello.expected_server = options.expected_server;
  hello.hosts_store = options.hosts_store;
  if (role == Role::kControl) {
    hello.leased_key = options.leased_key;
    hello.leased_value = options.leased_value;
  }
  return hello;
}

}  // namespace resilient::store
