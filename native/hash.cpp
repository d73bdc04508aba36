// A hash in two steps. First, of each block of 1024 bytes, as 32-bit words w: twice, with other
// keys k, the sum of (w[2i] + k[2i]) · (w[2i + 1] + k[2i + 1]), each sum in brackets modulo 2^32,
// the whole modulo 2^64 (NH of Black et al.): two different blocks agree with probability 2^-64.
// Then polynomials modulo 2^61 - 1 of those sums, one per lane: n sums that differ agree with
// probability n / 2^61.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "quantize.hpp"

namespace lmhead {
namespace {

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

// Pseudorandom numbers (splitmix64).
uint64_t mixed(uint64_t i) {
  uint64_t z = i * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

const std::array<uint32_t, kHashKeys>& block_keys() {
  static const auto keys = [] {
    std::array<uint32_t, kHashKeys> made{};
    for (size_t i = 0; i < made.size(); ++i) made[i] = static_cast<uint32_t>(mixed(i + 1) >> 32);
    return made;
  }();
  return keys;
}

uint64_t reduce(unsigned __int128 x) {
  const uint64_t sum = static_cast<uint64_t>(x & kPrime) + static_cast<uint64_t>(x >> 61);
  return sum >= kPrime ? sum - kPrime : sum;
}

}  // namespace

void hash_bytes(const QuantizeKernels& kernels, const uint8_t* bytes, size_t size,
                uint64_t (&lanes)[kHashLanes], int threads) {
  const size_t whole = size / kHashBlock, blocks = whole + (size % kHashBlock != 0);
  std::vector<uint64_t> sums(2 * blocks);
  const uint32_t* keys = block_keys().data();
  kernels.hash_blocks(bytes, static_cast<int64_t>(whole), keys, sums.data(), threads);
  if (whole < blocks) {  // the rest, with zeros after it
    uint8_t last[kHashBlock] = {};
    std::memcpy(last, bytes + whole * kHashBlock, size - whole * kHashBlock);
    kernels.hash_blocks(last, 1, keys, sums.data() + 2 * whole, 1);
  }
  std::fill_n(lanes, kHashLanes, uint64_t{1});
  for (size_t i = 0; i < sums.size(); ++i) {
    uint64_t& lane = lanes[i % kHashLanes];
    const uint64_t key = mixed(kHashKeys + i % kHashLanes + 1) >> 4;  // below 2^60
    const uint64_t other = mixed(2 * kHashKeys + i % kHashLanes + 1) >> 4;
    // lane · key + high · other + low: 2^122 and less, so that nothing overflows.
    lane = reduce(static_cast<unsigned __int128>(lane) * key +
                  static_cast<unsigned __int128>(sums[i] >> 32) * other + (sums[i] & 0xffffffff));
  }
}

}  // namespace lmhead
