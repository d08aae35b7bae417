#include "clock.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace emulator {

Clock launch_clock;

void Clock::begin_launch() {
    if (!chunks_) {
        const size_t bytes = sizeof(Chunk) * (SEGMENT_LIMIT >> 5);
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        chunks_ = static_cast<Chunk*>(memory);
    }
    launch_first = next_ << 5;
    first_block_ = serial_ + 1;
    blocks_.clear();
    variables_.clear();
}

uint32_t Clock::new_chunk(uint32_t block, uint32_t warp, uint32_t tick) {
    chunks_[next_] = {block, warp, tick};
    return next_++;
}

void Clock::begin_block(Block& b) {
    BlockClock& c = clock_of(b);
    c.serial = ++serial_;
    blocks_.push_back(b.block_index);
    c.first = c.barrier = next_ << 5;
    c.ticks.assign(b.warps.size(), 0);
    c.own.assign(b.threads.size(), 0);
    c.fenced.assign(b.threads.size(), 0);
    c.others.clear();
    c.brought.clear();
    c.acquired.clear();
    for (size_t warp = 0; warp < b.warps.size(); ++warp) advance(b, int(warp), ~0u);
}

// A new segment for the lanes of `mask`.
void Clock::advance(Block& b, int warp, unsigned mask) {
    BlockClock& c = clock_of(b);
    const uint32_t chunk = new_chunk(c.serial, warp, c.ticks[warp]);
    const int begin = warp * 32, end = std::min<int>(begin + 32, int(b.threads.size()));
    for (int i = begin; i < end; ++i)
        if (mask >> (i - begin) & 1) b.threads[i].segment = chunk << 5 | uint32_t(i - begin);
}

void Clock::block_synchronised(Block& b) {
    BlockClock& c = clock_of(b);
    c.barrier = next_ << 5;
    std::fill(c.fenced.begin(), c.fenced.end(), 0);
    for (size_t warp = 0; warp < b.warps.size(); ++warp) {
        ++c.ticks[warp];
        advance(b, int(warp), ~0u);
    }
}

void Clock::lanes_synchronised(Block& b, int warp, unsigned mask) {
    BlockClock& c = clock_of(b);
    const uint32_t tick = ++c.ticks[warp];
    advance(b, warp, mask);
    if (b.warps[warp].alive & ~mask) advance(b, warp, ~mask);  // what they do from now on is not ordered
    const size_t warps = c.ticks.size();
    std::vector<uint32_t> known(c.others.empty() ? 0 : warps, 0);
    for (int pass = 0; pass < 2; ++pass)
        for (unsigned rest = mask & b.warps[warp].alive; rest; rest &= rest - 1) {
            const int thread = warp * 32 + __builtin_ctz(rest);
            if (pass) c.own[thread] = tick;
            for (size_t w = 0; w < known.size(); ++w) {
                uint32_t& view = c.others[thread * warps + w];
                if (pass)
                    view = known[w];
                else
                    known[w] = std::max(known[w], view);
            }
        }
}

void Clock::arrive(Block& b, uint32_t barrier, Thread& t) {
    BlockClock& c = clock_of(b);
    const size_t warps = c.ticks.size();
    if (c.others.empty()) c.others.assign(b.threads.size() * warps, 0);
    auto& brought = c.brought[barrier];
    brought.resize(warps, 0);
    const uint32_t tick = ++c.ticks[t.warp];
    advance(b, t.warp, ~0u);
    for (size_t w = 0; w < warps; ++w) brought[w] = std::max(brought[w], c.others[t.linear * warps + w]);
    brought[t.warp] = std::max(brought[t.warp], tick);
}

void Clock::leave(Block& b, uint32_t barrier, Thread& t) {
    BlockClock& c = clock_of(b);
    const size_t warps = c.ticks.size();
    const auto found = c.brought.find(barrier);
    if (found == c.brought.end()) return;
    const auto& brought = found->second;
    for (size_t w = 0; w < warps; ++w) {
        uint32_t& view = c.others[t.linear * warps + w];
        view = std::max(view, brought[w]);
    }
    c.own[t.linear] = std::max(c.own[t.linear], brought[t.warp]);
}

void Clock::release(Thread& t, uintptr_t variable) {
    Block& b = *t.owner;
    BlockClock& c = clock_of(b);
    if (!c.fenced[t.linear]) return;
    const uint32_t tick = ++c.ticks[t.warp];
    advance(b, t.warp, ~0u);
    auto& published = variables_[variable];
    auto publish = [&](const Published& p) {
        for (Published& known : published)
            if (known.block == p.block && known.warp == p.warp) {
                known.barrier = std::max(known.barrier, p.barrier);
                known.tick = std::max(known.tick, p.tick);
                return;
            }
        published.push_back(p);
    };
    publish({c.serial, uint32_t(t.warp), c.barrier, tick});
    for (const auto& known : c.acquired) publish(known.second);
}

void Clock::acquire(Thread& t, uintptr_t variable) {
    if (variables_.empty()) return;
    const auto found = variables_.find(variable);
    if (found == variables_.end()) return;
    BlockClock& c = clock_of(*t.owner);
    for (const Published& p : found->second) {
        if (p.block == c.serial) {
            if (c.others.empty()) c.others.assign(t.owner->threads.size() * c.ticks.size(), 0);
            uint32_t& view = c.others[t.linear * c.ticks.size() + p.warp];
            view = std::max(view, p.tick);
            continue;
        }
        Published& known = c.acquired.try_emplace(uint64_t(p.block) << 32 | p.warp, p).first->second;
        known.barrier = std::max(known.barrier, p.barrier);
        known.tick = std::max(known.tick, p.tick);
    }
}

bool Clock::ordered(Segment segment, const Thread& t, const BlockClock& c, bool strict) const {
    if (segment < launch_first) return true;
    const Chunk& other = chunk(segment);
    if (other.block == c.serial) {
        if (segment < c.barrier) return true;
        if (int(other.warp) != t.warp) return c.knows(t.linear, other.warp, other.tick);
        if (!strict && int(segment & 31) == t.lane) return true;
        return other.tick < c.own[t.linear];
    }
    if (c.acquired.empty()) return false;
    const auto known = c.acquired.find(uint64_t(other.block) << 32 | other.warp);
    if (known != c.acquired.end() && other.tick < known->second.tick) return true;
    for (const auto& entry : c.acquired)
        if (entry.second.block == other.block && segment < entry.second.barrier) return true;
    return false;
}

}  // namespace emulator
