// The order of launches in several streams. Each launch has a number; a stream, an event and the host know of each stream up to
// which number its launches have ended.
#include "streams.h"

#include <deque>
#include <map>
#include <mutex>

#include "emulator/host_status.h"

namespace emulator {

std::vector<UnorderedLaunch> unordered_launches;

namespace {

using Known = std::map<const void*, uint64_t>;  // by stream
struct Earlier {
    UnorderedLaunch launch;
    const void* stream;
    uint64_t number;
    bool programmatic;
};
constexpr size_t MOST_EARLIER = 64;

std::mutex streams_mutex;
std::deque<Earlier> earlier;
std::map<const void*, Known> of_streams, of_events;
Known of_host;
thread_local int in_stream_work = 0;

void merge(Known& known, const Known& other) {
    for (const auto& [stream, number] : other) known[stream] = std::max(known[stream], number);
}

// The default stream has one key; it waits for all streams that are not made otherwise, and they for it.
const void* key_of(const void* stream) { return stream == cudaStreamLegacy ? nullptr : stream; }
bool waits_for_default(const void* stream) {
    return !is_made_by_create((cudaStream_t)stream) || !(((cudaStream_t)stream)->flags & cudaStreamNonBlocking);
}
std::map<const void*, bool> non_blocking;

Known known_in(const void* stream) {
    Known known = of_streams[stream];
    merge(known, of_host);
    if (!stream)
        for (const auto& [other, theirs] : of_streams) non_blocking[other] ? void() : merge(known, theirs);
    else if (!non_blocking[stream])
        merge(known, of_streams[nullptr]);
    return known;
}

}  // namespace

void order_launch(const Launch& launch) {
    std::lock_guard<std::mutex> lock(streams_mutex);
    const void* stream = key_of(launch.config.stream);
    non_blocking[stream] = !waits_for_default(stream);
    if (!earlier.empty()) earlier.back().launch.end = launch_clock.launch_first;
    Known known = known_in(stream);
    unordered_launches.clear();
    for (const Earlier& e : earlier)
        if (known[e.stream] < e.number) unordered_launches.push_back(e.launch);
    bool follows = launch.config.programmatic;
    for (auto e = earlier.rbegin(); follows && e != earlier.rend(); ++e)
        if (e->stream == stream && of_host[stream] < e->number) {
            unordered_launches.push_back(e->launch);
            unordered_launches.back().until_wait = true;
            follows = e->programmatic;
        }
    known[stream] = launch.number;
    of_streams[stream] = known;
    while (!earlier.empty() && (earlier.size() >= MOST_EARLIER || of_host[earlier.front().stream] >= earlier.front().number))
        earlier.pop_front();
    earlier.push_back(
        {{launch_clock.launch_first, SEGMENT_LIMIT, launch.kernel, false}, stream, launch.number, launch.config.programmatic});
}

void forget_earlier_launches() {
    std::lock_guard<std::mutex> lock(streams_mutex);
    earlier.clear();
}

void host_waits_for_the_device() {
    if (in_stream_work) return;
    std::lock_guard<std::mutex> lock(streams_mutex);
    merge(of_host, known_in(nullptr));
}

void work_in_stream(int change) { in_stream_work += change; }

void order(Order what, cudaStream_t given, cudaEvent_t event) {
    if (!options.checked() || current) return;
    std::lock_guard<std::mutex> lock(streams_mutex);
    const void* stream = key_of(given);
    switch (what) {
        case Order::stream_made:
            of_streams.erase(stream);
            non_blocking[stream] = !waits_for_default(stream);
            break;
        case Order::stream_synchronised:
            merge(of_host, known_in(stream));
            break;
        case Order::stream_waits:
            merge(of_streams[stream], of_events[event]);
            break;
        case Order::all_synchronised:
            for (const auto& [other, known] : of_streams) merge(of_host, known);
            break;
        case Order::event_made:
            of_events.erase(event);
            break;
        case Order::event_recorded:
            of_events[event] = known_in(stream);
            break;
        case Order::event_synchronised:
            merge(of_host, of_events[event]);
            break;
    }
}

}  // namespace emulator
