#include "runtime/net/resolver.h"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include <resilient/per_process.h>

#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr std::size_t kAddressesMax = 16;  // Of one name that are tried.

using FoundList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// 0, or the error of the resolver.
int GetAddresses(const std::string& host, int flags, FoundList* found) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (error == 0) found->reset(list);
  return error;
}

Addresses TextsOf(const addrinfo* list) {
  Addresses texts;
  for (const addrinfo* one = list; one != nullptr && texts.size() < kAddressesMax;
       one = one->ai_next) {
    char text[NI_MAXHOST];
    if (getnameinfo(one->ai_addr, one->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST) ==
        0) {
      texts.emplace_back(text);
    }
  }
  return texts;
}

Found AskSystem(const std::string& host) {
  FoundList list(nullptr, &freeaddrinfo);
  const int error = GetAddresses(host, 0, &list);
  const int system_error = errno;
  Addresses addresses = TextsOf(list.get());
  if (!addresses.empty()) return {std::move(addresses)};
  const std::string why = error == EAI_SYSTEM ? std::generic_category().message(system_error)
                          : error == 0        ? std::string("it has no address")
                                              : std::string(gai_strerror(error));
  return {Status(StatusCode::kResolve,
                 StrCat("the name '", host, "' does not resolve: ", why,
                        "; check its spelling and the DNS of this host (a pod's name appears with "
                        "the pod)")),
          error == EAI_AGAIN || error == EAI_SYSTEM || error == EAI_MEMORY};
}

class ThreadedResolver final : public Resolver {
 public:
  explicit ThreadedResolver(std::function<Found(const std::string&)> look_up)
      : book_(std::make_shared<Book>(std::move(look_up))) {}

  std::shared_ptr<const Lookup> Begin(const std::string& host, Instant now) override {
    const std::lock_guard lock(book_->mutex);
    Page& page = book_->pages[host];
    if (page.lookup == nullptr || page.lookup->done()) {
      page.lookup = Lookup::Start(
          "res-names", now, [book = book_, host] { return book->Note(host, book->look_up(host)); });
    }
    return page.lookup;
  }

  Addresses Known(const std::string& host) const override {
    const std::lock_guard lock(book_->mutex);
    const auto found = book_->pages.find(host);
    return found == book_->pages.end() ? Addresses() : found->second.known;
  }

 private:
  struct Page {
    std::shared_ptr<const Lookup> lookup;
    Addresses known;
  };
  // Shared with the threads.
  struct Book {
    explicit Book(std::function<Found(const std::string&)> call) : look_up(std::move(call)) {}

    Result<Addresses> Note(const std::string& host, Found found) {
      const std::lock_guard lock(mutex);
      Addresses& known = pages[host].known;
      if (found.addresses.ok()) {
        known = *found.addresses;
      } else if (found.temporary && !known.empty()) {
        return known;
      }
      return std::move(found.addresses);
    }

    const std::function<Found(const std::string&)> look_up;
    std::mutex mutex;
    std::map<std::string, Page> pages;  // Guarded by mutex.
  };

  const std::shared_ptr<Book> book_;
};

constinit PerProcess<ThreadedResolver> of_process;

}  // namespace

Resolver& Resolver::OfProcess() {
  return of_process.Get([] { return std::make_unique<ThreadedResolver>(&AskSystem); });
}

std::unique_ptr<Resolver> MakeResolver(std::function<Found(const std::string&)> look_up) {
  return std::make_unique<ThreadedResolver>(std::move(look_up));
}

std::optional<std::string> NumericForm(const std::string& host) {
  FoundList list(nullptr, &freeaddrinfo);
  if (GetAddresses(host, AI_NUMERICHOST, &list) != 0) return std::nullopt;
  Addresses texts = TextsOf(list.get());
  if (texts.empty()) return std::nullopt;
  return std::move(texts.front());
}

Status NotResolvedYet(const std::string& host, const Lookup& lookup, Instant now) {
  const auto waited = std::chrono::duration_cast<Millis>(now - lookup.since()).count();
  return {StatusCode::kResolve,
          StrCat("the name '", host,
                 "' is not resolved: the resolver of this host has not "
                 "answered for ",
                 static_cast<double>(waited) / 1e3,
                 " s; look at its name servers (/etc/resolv.conf, /etc/nsswitch.conf) and whether "
                 "they can be reached, or give the address as a number")};
}

Result<Addresses> ResolveWithin(Resolver& resolver, const std::string& host,
                                const InterruptCheck& interrupt, const Clock& clock,
                                Deadline deadline) {
  if (std::optional<std::string> number = NumericForm(host)) return Addresses{*std::move(number)};
  const Instant now = clock.Now();
  const std::shared_ptr<const Lookup> lookup = resolver.Begin(host, now);
  Addresses known = resolver.Known(host);
  const Deadline until =
      known.empty() ? deadline : std::min(deadline, Deadline::After(now, kFreshAnswerPatience));
  RESILIENT_RETURN_IF_ERROR(AwaitReadable(lookup->fd(), interrupt, clock, until));
  if (lookup->done()) return lookup->result();
  if (!known.empty()) return known;
  return NotResolvedYet(host, *lookup, clock.Now());
}

}  // namespace resilient
