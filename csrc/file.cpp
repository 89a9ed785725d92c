// See file.hpp for what is guaranteed.
#include "file.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "error.hpp"
#include "recorder.hpp"

namespace megatron_uring {
namespace {

constexpr int retry_limit = 1000;
constexpr std::int64_t max_request_bytes = 0x7ffff000;  // what Linux transfers in one call at most

std::array<std::atomic<int>, 256> child_closes{};  // descriptor + 1; 0 is an empty slot

void after_fork_in_child() {
    fork_generation.fetch_add(1, std::memory_order_relaxed);
    for (auto& slot : child_closes) {
        const int number = slot.exchange(0) - 1;
        if (number >= 0) ::close(number);
    }
}

[[maybe_unused]] const int fork_handler_installed =
    pthread_atfork(nullptr, nullptr, after_fork_in_child);

// Repeats what was interrupted; only for operations that are harmless to repeat.
template <class Call>
std::int64_t retry(Operation operation, const std::string& path, std::int64_t offset,
                   std::int64_t length, Call&& call) {
    std::int64_t result = 0;
    for (int attempt = 0; attempt < retry_limit; ++attempt) {
        result = recorder::perform(operation, path, offset, length, call);
        if (result != -EINTR && result != -EAGAIN) return result;
        if (result == -EAGAIN) ::usleep(static_cast<useconds_t>(50 * std::min(attempt + 1, 20)));
    }
    return result;
}

[[noreturn]] void fail(std::int64_t result, const std::string& context, const std::string& path) {
    throw OsError(static_cast<int>(-result), context, path);
}

int open_number(const std::string& path, int flags) {
    const std::int64_t result = retry(Operation::open, path, flags, 0, [&](std::int64_t) {
        return ::open(path.c_str(), flags | O_CLOEXEC, 0666);
    });
    if (result < 0) fail(result, "open", path);
    return static_cast<int>(result);
}

std::atomic<std::uint64_t> next_serial{1};

}  // namespace

Descriptor::Descriptor(int number, std::string path)
    : number_(number), serial_(next_serial.fetch_add(1)), path_(std::move(path)) {
    ask_alignment();
}

Descriptor::~Descriptor() {
    try {
        close();
    } catch (const std::exception&) {
        // Nobody is left to tell. Data that had to be durable has been synced before.
    }
}

void Descriptor::ask_alignment() noexcept {
#ifdef STATX_DIOALIGN
    struct statx facts = {};
    unsigned mask = STATX_DIOALIGN;
#ifdef STATX_DIO_READ_ALIGN
    mask |= STATX_DIO_READ_ALIGN;
#endif
    if (::statx(number_, "", AT_EMPTY_PATH, mask, &facts) != 0) return;
    if ((facts.stx_mask & STATX_DIOALIGN) == 0) return;
    if (facts.stx_dio_offset_align == 0 || facts.stx_dio_mem_align == 0) {
        direct_refused_ = true;  // the kernel says that this file has no direct I/O
        return;
    }
    offset_alignment_ = facts.stx_dio_offset_align;
    memory_alignment_ = facts.stx_dio_mem_align;
#ifdef STATX_DIO_READ_ALIGN
    if ((facts.stx_mask & STATX_DIO_READ_ALIGN) != 0) {
        offset_alignment_ =
            std::max(offset_alignment_, std::int64_t{facts.stx_dio_read_offset_align});
    }
#endif
#endif
}

int Descriptor::set_direct(bool direct) noexcept {
    if (direct && direct_refused_) return EINVAL;
    const int flags = ::fcntl(number_, F_GETFL);
    if (flags < 0) return errno;
    const int wanted = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
    if (wanted != flags && ::fcntl(number_, F_SETFL, wanted) != 0) return errno;
    direct_.store(direct, std::memory_order_relaxed);
    return 0;
}

void Descriptor::close() {
    if (number_ < 0) return;
    const int number = std::exchange(number_, -1);
    bool closed = false;
    const std::int64_t result = recorder::perform(Operation::close, path_, 0, 0, [&](std::int64_t) {
        closed = true;
        return ::close(number);
    });
    if (!closed) ::close(number);  // an injected error must not leak the descriptor
    // Linux has closed the descriptor also when it reports EINTR.
    if (result < 0 && result != -EINTR) fail(result, "close", path_);
}

File::File(const std::string& path, int flags, bool direct) : path_(path) {
    int number = -1;
    try {
        number = open_number(path, flags);
    } catch (const OsError& error) {
        if (!direct || error.number() != EINVAL) throw;
        direct = false;
        number = open_number(path, flags);
    }
    descriptor_ = std::make_shared<Descriptor>(number, path);
    if (direct) {
        const int error = descriptor_->set_direct(true);
        if (error != 0 && error != EINVAL) fail(-error, "fcntl(O_DIRECT)", path);
    }
    offset_alignment_ = descriptor_->offset_alignment();
    memory_alignment_ = descriptor_->memory_alignment();
}

std::unique_ptr<File> File::create(const std::string& path, bool direct) {
    return std::unique_ptr<File>(new File(path, O_RDWR | O_CREAT | O_EXCL, direct));
}

std::unique_ptr<File> File::open(const std::string& path, bool writable, bool direct) {
    std::unique_ptr<File> file(new File(path, writable ? O_RDWR : O_RDONLY, direct));
    if (!writable && !file->direct()) {
        // Buffered reads come in long ascending runs: a hint, whose failure means nothing.
        ::posix_fadvise(file->descriptor()->number(), 0, 0, POSIX_FADV_SEQUENTIAL);
    }
    return file;
}

std::shared_ptr<Descriptor> File::descriptor() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (descriptor_ == nullptr) throw std::invalid_argument("file is closed: " + path_);
    return descriptor_;
}

bool File::direct() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return descriptor_ != nullptr ? descriptor_->direct() : last_direct_;
}

void File::set_direct(bool direct) {
    const int error = descriptor()->set_direct(direct);
    if (error != 0) fail(-error, direct ? "fcntl(O_DIRECT)" : "fcntl(no O_DIRECT)", path_);
}

std::int64_t File::size() const {
    struct stat facts = {};
    if (::fstat(descriptor()->number(), &facts) != 0) fail(-errno, "fstat", path_);
    return facts.st_size;
}

bool File::preallocate(std::int64_t length, std::int64_t start) {
    if (length < 0 || start < 0) throw std::invalid_argument("length or start is negative");
    if (length == 0) return true;
    const auto held = descriptor();
    const std::int64_t result =
        retry(Operation::preallocate, path_, start, length,
              [&](std::int64_t wanted) { return ::fallocate(held->number(), 0, start, wanted); });
    if (result == -EOPNOTSUPP || result == -ENOSYS || result == -EINVAL) return false;
    if (result < 0) fail(result, describe("preallocate", start, length), path_);
    return true;
}

void File::truncate(std::int64_t length) {
    if (length < 0) throw std::invalid_argument("length is negative");
    const auto held = descriptor();
    const std::int64_t result =
        retry(Operation::truncate, path_, 0, length,
              [&](std::int64_t wanted) { return ::ftruncate(held->number(), wanted); });
    if (result < 0) fail(result, "truncate to " + std::to_string(length) + " bytes", path_);
}

void File::close() {
    std::shared_ptr<Descriptor> last;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (descriptor_ == nullptr) return;
        last_direct_ = descriptor_->direct();
        last = std::move(descriptor_);
    }
    // New owners come only from descriptor(), which finds nothing now: the count can only fall.
    if (last.use_count() == 1) last->close();
}

bool File::closed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return descriptor_ == nullptr;
}

namespace {

void write_all(Descriptor& file, const std::uint8_t* data, std::int64_t length) {
    std::int64_t done = 0;
    int idle = 0;
    while (done < length) {
        const std::int64_t result = retry(
            Operation::write, file.path(), done, std::min(length - done, max_request_bytes),
            [&](std::int64_t wanted) {
                return ::pwrite(file.number(), data + done, static_cast<std::size_t>(wanted), done);
            });
        if (result < 0) fail(result, describe("write", done, length - done), file.path());
        idle = result == 0 ? idle + 1 : 0;
        if (idle == retry_limit) fail(-EIO, describe("write", done, length - done), file.path());
        done += result;
    }
}

void sync_number(Descriptor& file, Operation operation) {
    // EINTR is not retried: after a failed sync the state of the pages is unknown.
    const std::int64_t result = recorder::perform(
        operation, file.path(), 0, 0, [&](std::int64_t) { return ::fsync(file.number()); });
    if (result == 0) return;
    const bool unsupported = result == -EINVAL || result == -ENOTSUP;
    if (operation == Operation::sync_directory && unsupported) return;
    fail(result, "fsync", file.path());
}

}  // namespace

void write_file(const std::string& path, const std::uint8_t* data, std::int64_t length, bool sync) {
    Descriptor file(open_number(path, O_WRONLY | O_CREAT | O_EXCL), path);
    try {
        write_all(file, data, length);
        if (sync) sync_number(file, Operation::sync);
        file.close();
    } catch (...) {
        ::unlink(path.c_str());  // best effort, and not through the recorder: the first error is
                                 // the one to report
        throw;
    }
}

std::string read_file(const std::string& path) {
    Descriptor file(open_number(path, O_RDONLY), path);
    struct stat facts = {};
    if (::fstat(file.number(), &facts) != 0) fail(-errno, "fstat", path);
    std::string content(static_cast<std::size_t>(std::max<off_t>(facts.st_size, 0)), '\0');
    std::int64_t done = 0;
    const auto size = static_cast<std::int64_t>(content.size());
    while (done < size) {
        const std::int64_t result =
            retry(Operation::read, path, done, std::min(size - done, max_request_bytes),
                  [&](std::int64_t wanted) {
                      return ::pread(file.number(), content.data() + done,
                                     static_cast<std::size_t>(wanted), done);
                  });
        if (result < 0) fail(result, describe("read", done, size - done), path);
        if (result == 0) fail(-ENODATA, describe("read", done, size - done), path);
        done += result;
    }
    file.close();
    return content;
}

void rename(const std::string& source, const std::string& destination) {
    const std::string both = source + " -> " + destination;
    const std::int64_t result = recorder::perform(Operation::rename, both, 0, 0, [&](std::int64_t) {
        return ::rename(source.c_str(), destination.c_str());
    });
    if (result < 0) fail(result, "rename from " + source, destination);
}

void sync_directory(const std::string& path) {
    Descriptor directory(open_number(path, O_RDONLY | O_DIRECTORY), path);
    sync_number(directory, Operation::sync_directory);
}

void remove(const std::string& path) {
    const std::int64_t result =
        retry(Operation::remove, path, 0, 0, [&](std::int64_t) { return ::unlink(path.c_str()); });
    if (result < 0 && result != -ENOENT) fail(result, "unlink", path);
}

void close_in_child(int number) noexcept {
    for (auto& slot : child_closes) {
        int empty = 0;
        if (slot.compare_exchange_strong(empty, number + 1)) return;
    }
}

void forget_in_child(int number) noexcept {
    for (auto& slot : child_closes) {
        int expected = number + 1;
        if (slot.compare_exchange_strong(expected, 0)) return;
    }
}

}  // namespace megatron_uring
