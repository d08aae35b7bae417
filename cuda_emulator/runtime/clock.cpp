#include "clock.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace emulator {

Clock launch_clock;

namespace {

constexpr int LANES = 32;

constexpr int OF_BLOCK = -1;  // in place of a thread
constexpr int of_warp(int warp) { return -2 - warp; }

bool is_mbarrier(uint32_t barrier) { return barrier >= ARENA_START; }  // else the number of a named one
uint64_t key_of(const Published& p) { return uint64_t(p.block) << 32 | p.warp; }
void raise(uint32_t& tick, uint32_t to) { tick = std::max(tick, to); }
void raise(uint32_t* ticks, const uint32_t* to, size_t count) {
    for (size_t i = 0; i < count; ++i) ticks[i] = std::max(ticks[i], to[i]);
}

void learn(BlockClock& c, const Published& p) {
    c.acquired.try_emplace(key_of(p), p).first->second.merge(p);
    raise(c.acquired_barriers[p.block], p.barrier);
}

}  // namespace

void Published::merge(const Published& other) {
    raise(barrier, other.barrier);
    raise(ticks.data(), other.ticks.data(), LANES);
}

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
    c.own.assign(b.threads.size() * LANES, 0);
    c.fences.assign(b.threads.size(), Fence::none_needed);
    c.fenced_for_block.assign(b.threads.size(), 0);
    c.variables.clear();
    c.seen.clear();
    c.others.clear();
    c.brought.clear();
    c.ended.clear();
    c.from_outside.clear();
    c.own_fence.assign(b.threads.size(), 0);
    c.fenced_barrier = 0;
    c.fenced_ticks.assign(b.threads.size(), 0);
    c.acquired.clear();
    c.acquired_barriers.clear();
    for (size_t warp = 0; warp < b.warps.size(); ++warp) advance(b, int(warp), ~0u);
}

// A new segment for the lanes of `mask`.
void Clock::advance(Block& b, int warp, unsigned mask) {
    BlockClock& c = clock_of(b);
    const uint32_t chunk = new_chunk(c.serial, warp, c.ticks[warp]);
    const int begin = warp * LANES, end = std::min<int>(begin + LANES, int(b.threads.size()));
    for (int i = begin; i < end; ++i)
        if (mask >> (i - begin) & 1) b.threads[i].segment = chunk << 5 | uint32_t(i - begin);
}

void Clock::block_synchronised(Block& b) {
    BlockClock& c = clock_of(b);
    if (!c.seen.empty()) share_seen(c, of_warp(int(b.warps.size())), int(b.threads.size()), OF_BLOCK);
    c.barrier = next_ << 5;
    // Fences are cumulative: behind the barrier each thread has passed those of all. They count if no write lacks one.
    const auto any = [&](Fence fence) { return std::find(c.fences.begin(), c.fences.end(), fence) != c.fences.end(); };
    const bool passed = any(Fence::passed) && !any(Fence::missing);
    std::fill(c.fences.begin(), c.fences.end(), passed ? Fence::passed : Fence::none_needed);
    std::fill(c.fenced_for_block.begin(), c.fenced_for_block.end(), 0);
    for (size_t warp = 0; warp < b.warps.size(); ++warp) {
        ++c.ticks[warp];
        advance(b, int(warp), ~0u);
    }
}

void Clock::blocks_synchronised(const std::vector<Block*>& blocks) {
    for (Block* b : blocks)
        if (b) block_synchronised(*b);
    for (Block* b : blocks)
        for (Block* other : blocks)
            if (b && other && b != other) learn(clock_of(*b), {clock_of(*other).serial, 0, clock_of(*other).barrier, {}});
}

// What the first of them does counts as new to all.
void Clock::cluster_begins(const std::vector<Block*>& blocks) {
    for (Block* b : blocks) clock_of(*b).first = clock_of(*blocks.front()).first;
}

// Calls visit(published) for each warp of the thread's block of which anything is ordered before the thread's next segment.
template <class Visit>
void Clock::for_each_published(const Thread& t, Visit visit) const {
    BlockClock& c = clock_of(*t.owner);
    const size_t warps = c.others.empty() ? 0 : c.ticks.size();
    for (size_t warp = 0; warp < warps; ++warp) {
        if (int(warp) == t.warp) continue;
        Published p{c.serial, uint32_t(warp), c.barrier, {}};
        std::copy_n(c.others_of(t.linear) + warp * LANES, std::min<size_t>(LANES, c.threads() - warp * LANES), p.ticks.begin());
        if (std::any_of(p.ticks.begin(), p.ticks.end(), [](uint32_t tick) { return tick; })) visit(p);
    }
    Published own{c.serial, uint32_t(t.warp), c.barrier, {}};
    std::copy_n(c.own.begin() + t.linear * LANES, LANES, own.ticks.begin());
    own.ticks[t.lane] = c.ticks[t.warp];
    visit(own);
}

void Clock::arrive_from_outside(Block& home, uint32_t barrier, Thread& t) {
    ++clock_of(*t.owner).ticks[t.warp];
    advance(*t.owner, t.warp, 1u << t.lane);
    auto& brought = clock_of(home).from_outside[barrier];
    for_each_published(t, [&](const Published& p) { brought.try_emplace(key_of(p), p).first->second.merge(p); });
}

void Clock::lanes_synchronised(Block& b, int warp, unsigned mask) {
    BlockClock& c = clock_of(b);
    if (!c.seen.empty()) share_seen(c, warp * LANES, warp * LANES + LANES - 1, of_warp(warp));
    const uint32_t tick = ++c.ticks[warp];
    advance(b, warp, mask);
    const unsigned lanes = mask & b.warps[warp].alive;
    uint32_t own[LANES] = {};
    BlockClock::Ticks others(c.others.empty() ? 0 : c.threads(), 0);
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        const int thread = warp * LANES + __builtin_ctz(rest);
        raise(own, &c.own[thread * LANES], LANES);
        if (!others.empty()) raise(others.data(), c.others_of(thread), others.size());
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) own[__builtin_ctz(rest)] = tick;
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        const int thread = warp * LANES + __builtin_ctz(rest);
        std::copy_n(own, LANES, &c.own[thread * LANES]);
        std::copy(others.begin(), others.end(), c.others.begin() + thread * others.size());
    }
}

void Clock::arrive(Block& b, uint32_t barrier, Thread& t) {
    BlockClock& c = clock_of(b);
    if (c.others.empty()) c.others.assign(c.threads() * c.threads(), 0);
    const uint32_t tick = ++c.ticks[t.warp];
    advance(b, t.warp, 1u << t.lane);
    auto& brought = c.brought[barrier];
    brought.resize(c.threads(), 0);
    raise(brought.data(), c.others_of(t.linear), c.threads());
    const size_t first = t.linear - t.lane;
    raise(&brought[first], &c.own[t.linear * LANES], std::min<size_t>(LANES, c.threads() - first));
    raise(brought[t.linear], tick);
}

void Clock::leave(Block& b, uint32_t barrier, Thread& t) {
    BlockClock& c = clock_of(b);
    const auto outside = c.from_outside.find(barrier);
    if (outside != c.from_outside.end())
        for (const auto& entry : outside->second) learn(c, entry.second);
    const auto& source = is_mbarrier(barrier) ? c.ended : c.brought;
    const auto found = source.find(barrier);
    if (found == source.end()) return;
    const auto& brought = found->second;
    raise(c.others_of(t.linear), brought.data(), c.threads());
    const size_t first = t.linear - t.lane;
    raise(&c.own[t.linear * LANES], &brought[first], std::min<size_t>(LANES, c.threads() - first));
}

void Clock::phase_ends(Block& b, uint32_t barrier) {
    BlockClock& c = clock_of(b);
    const auto found = c.brought.find(barrier);  // none if all who arrived are of other blocks
    if (found != c.brought.end()) c.ended[barrier] = found->second;
}

void Clock::proxy_fence(Thread& t) {
    BlockClock& c = clock_of(*t.owner);
    ++c.ticks[t.warp];
    advance(*t.owner, t.warp, 1u << t.lane);
    c.own_fence[t.linear] = t.segment;
    raise(c.fenced_barrier, c.barrier);
    const size_t first = t.linear - t.lane;
    raise(&c.fenced_ticks[first], &c.own[t.linear * LANES], std::min<size_t>(LANES, c.threads() - first));
    if (!c.others.empty()) raise(c.fenced_ticks.data(), c.others_of(t.linear), c.threads());
}

bool Clock::behind_proxy_fence(Segment segment, const BlockClock& c) const {
    const Chunk& writer = chunk(segment);
    const size_t thread = writer.warp * LANES + (segment & 31);
    return segment < c.fenced_barrier || segment < c.own_fence[thread] || writer.tick < c.fenced_ticks[thread];
}

void Clock::release(Thread& t, uintptr_t variable) {
    BlockClock& c = clock_of(*t.owner);
    const bool for_all = c.fences[t.linear] == Fence::passed;
    if (!for_all && !c.fenced_for_block[t.linear]) return;
    ++c.ticks[t.warp];
    advance(*t.owner, t.warp, 1u << t.lane);
    auto& published = (for_all ? variables_ : c.variables)[variable];
    if (!published || published.use_count() > 1)
        published = published ? std::make_shared<PublishedByWarp>(*published) : std::make_shared<PublishedByWarp>();
    const auto publish = [&](const Published& p) { published->try_emplace(key_of(p), p).first->second.merge(p); };
    for_each_published(t, publish);
    for (const auto& known : c.acquired) publish(known.second);
}

void Clock::see(Thread& t, uintptr_t variable) {
    BlockClock& c = clock_of(*t.owner);
    if (variables_.empty() && c.variables.empty()) return;
    const auto published = [&](const PublishedByVariable& variables) {
        const auto found = variables.find(variable);
        return found == variables.end() ? nullptr : found->second;
    };
    Seen now{published(variables_), published(c.variables), ++times_seen_};
    if (now.by_all || now.by_block) c.seen[{t.linear, variable}] = std::move(now);
}

void Clock::fence(Thread& t, bool for_block) {
    BlockClock& c = clock_of(*t.owner);
    for (const int who : {t.linear, of_warp(t.warp), OF_BLOCK}) {
        const auto first = c.seen.lower_bound({who, 0}), last = c.seen.lower_bound({who + 1, 0});
        for (auto seen = first; seen != last; ++seen) {
            if (seen->second.by_all) acquire(*seen->second.by_all, t, for_block);
            if (seen->second.by_block) acquire(*seen->second.by_block, t, for_block);
        }
        if (!for_block && who != of_warp(t.warp)) c.seen.erase(first, last);  // other lanes may still need the warp's
    }
}

// What threads have seen, so have those with which they meet.
void Clock::share_seen(BlockClock& c, int first_thread, int last_thread, int as) {
    const auto first = c.seen.lower_bound({first_thread, 0}), last = c.seen.lower_bound({last_thread + 1, 0});
    for (auto seen = first; seen != last;) {
        if (seen->first.first == as) {
            ++seen;
            continue;
        }
        Seen& shared = c.seen[{as, seen->first.second}];
        if (shared.when < seen->second.when) shared = std::move(seen->second);
        seen = c.seen.erase(seen);
    }
}

bool Clock::is_seen_without_a_fence(Segment segment, const BlockClock& c) const {
    const Chunk& other = chunk(segment);
    for (const auto& seen : c.seen)
        for (const auto& published : {seen.second.by_all, seen.second.by_block})
            if (published)
                for (const auto& [key, p] : *published)
                    if (p.block == other.block &&
                        (segment < p.barrier || (p.warp == other.warp && other.tick < p.ticks[segment & 31])))
                        return true;
    return false;
}

// With `for_block` only what threads of the block have published: that of others takes a fence for the device.
void Clock::acquire(const PublishedByWarp& published, Thread& t, bool for_block) {
    BlockClock& c = clock_of(*t.owner);
    for (const auto& entry : published) {
        const Published& p = entry.second;
        if (p.block != c.serial) {
            if (!for_block) learn(c, p);
            continue;
        }
        if (c.others.empty()) c.others.assign(c.threads() * c.threads(), 0);
        const size_t first = p.warp * LANES, lanes = std::min<size_t>(LANES, c.threads() - first);
        if (int(p.warp) == t.warp)
            raise(&c.own[t.linear * LANES], p.ticks.data(), lanes);
        else
            raise(c.others_of(t.linear) + first, p.ticks.data(), lanes);
    }
}

bool Clock::ordered(Segment segment, const Thread& t, const BlockClock& c, bool strict) const {
    if (segment < launch_first) return true;
    const Chunk& other = chunk(segment);
    const int lane = int(segment & 31);
    if (other.block == c.serial) {
        if (segment < c.barrier) return true;
        if (int(other.warp) != t.warp) return c.knows(t.linear, int(other.warp) * LANES + lane, other.tick);
        if (!strict && lane == t.lane) return true;
        return other.tick < c.own[t.linear * LANES + lane];
    }
    if (c.acquired.empty()) return false;
    const auto barrier = c.acquired_barriers.find(other.block);
    if (barrier == c.acquired_barriers.end()) return false;
    if (segment < barrier->second) return true;
    const auto known = c.acquired.find(uint64_t(other.block) << 32 | other.warp);
    return known != c.acquired.end() && other.tick < known->second.ticks[lane];
}

}  // namespace emulator
