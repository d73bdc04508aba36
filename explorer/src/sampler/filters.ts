// The filters: which tokens may be drawn. Each has the definition of `lmhead.sampling.truncation_stages`.

import { firstIndex, type Candidates } from "./candidates";

/** The best tokens until their probabilities reach p: one stays if those before it have less. */
export function topP(c: Candidates, p: number): Candidates {
  if (p >= 1) return c;
  const [limit, e] = [p * c.sum, c.e];
  let [before, n] = [0, 0];
  for (; n < c.size && before < limit; n++) before += e[n] as number;
  return c.best(n);
}

/** Tokens with p >= share · (largest p). */
export function minP(c: Candidates, share: number): Candidates {
  return c.best(firstIndex(c.size, (at) => Math.exp((c.z[at] as number) - (c.z[0] as number)) < share));
}

/** Tokens with p >= epsilon. */
export function epsilonCutoff(c: Candidates, epsilon: number): Candidates {
  return c.best(firstIndex(c.size, (at) => c.p(at) < epsilon));
}

/** Tokens with p >= min(epsilon, √epsilon · exp(-entropy)). */
export function etaCutoff(c: Candidates, epsilon: number): Candidates {
  return epsilonCutoff(c, Math.min(epsilon, Math.sqrt(epsilon) * Math.exp(-c.entropy)));
}

/** Tokens with z >= max z - n · (standard deviation of z). */
export function topNSigma(c: Candidates, n: number): Candidates {
  return n > 0 ? c.above((c.z[0] as number) - n * c.deviation) : c;
}

const MAX_H = 100;

/** Of the 100 best: the first ones whose terms -p log p add up to at most the share of their entropy. */
export function topH(c: Candidates, share: number): Candidates {
  const best = c.best(MAX_H);
  const limit = share >= 1 ? Infinity : share * best.entropy;
  let [sum, n] = [0, 0];
  for (; n < best.size && best.p(n) > 0; n++) {
    sum -= best.p(n) * best.logP(n);
    if (sum > limit) break;
  }
  return best.best(n);
}

/** The tokens whose surprisal is nearest to the entropy, until their probabilities reach the share. */
export function typicalP(c: Candidates, share: number): Candidates {
  if (share >= 1) return c;
  const best = c.z[0] as number;
  const x = (at: number): number => (c.z[at] as number) - best;
  // Surprisal less entropy is mean - x, where mean = Σ p x.
  const mean = Math.log(c.total) - c.entropy;
  const [limit, e] = [share * c.sum, c.e];
  // Distances grow on both sides of the centre: two pointers move apart.
  let up = firstIndex(c.size, (at) => x(at) < mean);
  let down = up;
  let mass = 0;
  while (mass < limit && (up > 0 || down < c.size)) {
    if (up > 0 && (down === c.size || x(up - 1) - mean <= mean - x(down))) {
      // Equal logits are equally near: the lowest ids, which come first, stay.
      const level = c.z[up - 1];
      let start = up - 1;
      while (start > 0 && c.z[start - 1] === level) start--;
      let end = start;
      while (end < up && mass < limit) mass += e[end++] as number;
      if (end < up) return c.without(start, end, up, down);
      up = start;
    } else mass += e[down++] as number;
  }
  return down > up ? c.slice(up, down) : c.best(1);
}

/** Exclude top choices: all tokens with p >= threshold but the least probable of them go. */
export function excludeTopChoices(c: Candidates, threshold: number): Candidates {
  if (threshold > 0.5) return c;
  const likely = firstIndex(c.size, (at) => c.p(at) < threshold);
  return likely > 1 ? c.slice(likely - 1, c.size) : c;
}

/** Mirostat 2: the tokens with a surprisal of at most mu bits. */
export function mirostat2(c: Candidates, mu: number): Candidates {
  return c.best(firstIndex(c.size, (at) => -c.logP(at) / Math.LN2 > mu));
}

/** Mirostat 1: the k best, k estimated as if probabilities followed Zipf's law. */
export function mirostat1(c: Candidates, mu: number, vocabulary: number): Candidates {
  const fitted = Math.min(MAX_H, c.size);
  if (fitted < 2) return c.best(1);
  let [products, squares] = [0, 0];
  for (let at = 1; at < fitted; at++) {
    const t = Math.log((at + 1) / at);
    products += t * ((c.z[at - 1] as number) - (c.z[at] as number));
    squares += t * t;
  }
  const s = products / squares;
  const [rest, logSize] = [s - 1, Math.log(vocabulary)];
  const ratio = rest === 0 ? 1 / logSize : rest / -Math.expm1(-rest * logSize);
  const sLogK = Math.log(ratio) + mu * Math.LN2;
  if (s === 0) return c.best(sLogK > 0 ? vocabulary : 1);
  return c.best(Math.floor(Math.exp(Math.min(sLogK / s, logSize + 1))));
}
