// Transfers of the engine: I/O alone, straight between memory and files. See engine.hpp for what is
// guaranteed.
#include <stdexcept>
#include <utility>

#include "engine.hpp"

namespace megatron_uring {

std::shared_ptr<Job> Engine::transfer(Operation operation, const std::vector<const File*>& files,
                                      std::vector<Range> ranges,
                                      std::vector<std::uint8_t*> addresses) {
    stamp_.require_owner("engine");
    if (operation != Operation::write && operation != Operation::read) {
        throw std::invalid_argument("operation is not write or read");
    }
    std::vector<std::shared_ptr<Descriptor>> descriptors;
    descriptors.reserve(files.size());
    for (const File* file : files) descriptors.push_back(file->descriptor());
    auto job = std::make_shared<Job>(operation, std::move(descriptors), std::move(ranges),
                                     std::move(addresses));
    start(job);
    return job;
}

// None while as many are under way as the backend can have in flight, twice, so that it need not
// wait for the next.
std::unique_ptr<Request> Engine::next_transfer_locked() {
    if (waiting_.empty() || waiting_.front()->addresses_.empty()) return nullptr;
    if (transfers_in_flight_ >= transfer_limit_) return nullptr;
    auto request = std::make_unique<Request>();
    request->job = waiting_.front();
    request->operation = request->job->operation_;
    cut_locked(*request);
    ++transfers_in_flight_;
    return request;
}

}  // namespace megatron_uring
