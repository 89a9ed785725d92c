// Files: descriptors with one owner, and the durable small-file operations of the commit.
//
// 1. Every operation passes the recorder and fails with errno, path, operation, offset and length.
// 2. A descriptor is closed exactly once. A job keeps the descriptors it uses: File::close during a
//    job takes effect when the job has ended, so a number is never reused under an operation in
//    flight.
// 3. Creating is exclusive and never leaves a half-made file behind for O_DIRECT's sake: the file
//    is opened without it, then switched, since Linux reports O_DIRECT's EINVAL after it has
//    created the file.
// 4. `direct` says what is in force, after all fallbacks. Alignment comes from statx; 4096 where it
//    does not tell.
// 5. write_file leaves either a whole file, synced unless the caller can do without, or none.
// Nothing
//    is retried after a failed sync.
// 6. Children of fork close the descriptors that were registered with close_in_child.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace megatron_uring {

class Descriptor {
  public:
    Descriptor(int number, std::string path);
    ~Descriptor();
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    int number() const noexcept { return number_; }
    // Of this descriptor alone, unlike its number, which the next file may get.
    std::uint64_t serial() const noexcept { return serial_; }
    const std::string& path() const noexcept { return path_; }
    bool direct() const noexcept { return direct_.load(std::memory_order_relaxed); }
    std::int64_t offset_alignment() const noexcept { return offset_alignment_; }
    std::int64_t memory_alignment() const noexcept { return memory_alignment_; }

    // Returns 0 or the errno; safe from any thread.
    int set_direct(bool direct) noexcept;
    void close();

  private:
    void ask_alignment() noexcept;

    int number_;
    const std::uint64_t serial_;
    const std::string path_;
    std::atomic<bool> direct_{false};
    bool direct_refused_ = false;
    std::int64_t offset_alignment_ = 4096;
    std::int64_t memory_alignment_ = 4096;
};

class File {
  public:
    static std::unique_ptr<File> create(const std::string& path, bool direct);
    static std::unique_ptr<File> open(const std::string& path, bool writable, bool direct);

    const std::string& path() const noexcept { return path_; }
    bool direct() const;
    std::int64_t offset_alignment() const noexcept { return offset_alignment_; }
    std::int64_t memory_alignment() const noexcept { return memory_alignment_; }
    void set_direct(bool direct);
    std::int64_t size() const;
    bool preallocate(std::int64_t length, std::int64_t start = 0);
    void truncate(std::int64_t length);
    void close();
    bool closed() const;

    // The descriptor, kept open for as long as the caller holds it. Throws std::invalid_argument on
    // a closed file.
    std::shared_ptr<Descriptor> descriptor() const;

  private:
    File(const std::string& path, int flags, bool direct);

    const std::string path_;
    std::int64_t offset_alignment_ = 4096;
    std::int64_t memory_alignment_ = 4096;
    mutable std::mutex mutex_;
    std::shared_ptr<Descriptor> descriptor_;
    bool last_direct_ = false;
};

void write_file(const std::string& path, const std::uint8_t* data, std::int64_t length, bool sync);
std::string read_file(const std::string& path);
void rename(const std::string& source, const std::string& destination);
void sync_directory(const std::string& path);
void remove(const std::string& path);

// At most 256 at a time; one more is simply not closed in children.
void close_in_child(int number) noexcept;
void forget_in_child(int number) noexcept;

}  // namespace megatron_uring
