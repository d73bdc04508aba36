// torch's random numbers on a CPU, for `nn.Linear`: the Mersenne Twister and float32 numbers made from it.

const [SIZE, SHIFT] = [624, 397];

/** The 32-bit numbers of MT19937 after `torch.manual_seed(seed)`. */
export class MersenneTwister {
  private readonly state = new Uint32Array(SIZE);
  private at = SIZE;

  constructor(seed: number) {
    const { state } = this;
    state[0] = seed;
    for (let j = 1; j < SIZE; j++) {
      const last = state[j - 1] as number;
      state[j] = Math.imul(1812433253, last ^ (last >>> 30)) + j;
    }
  }

  next(): number {
    if (this.at === SIZE) this.twist();
    let y = this.state[this.at++] as number;
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  /** `torch.empty(count).uniform_(-bound, bound)`: 24 random bits each, rounded to float32. */
  uniform(bound: number, count: number): Float32Array {
    const half = Math.fround(bound);
    return Float32Array.from({ length: count }, () => (this.next() & 0xffffff) * 2 ** -24 * 2 * half - half);
  }

  private twist(): void {
    const { state } = this;
    for (let k = 0; k < SIZE; k++) {
      const y = ((state[k] as number) & 0x80000000) | ((state[(k + 1) % SIZE] as number) & 0x7fffffff);
      state[k] = (state[(k + SHIFT) % SIZE] as number) ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    this.at = 0;
  }
}
