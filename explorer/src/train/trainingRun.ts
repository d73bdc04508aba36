// A training run: log lines collected over many responses, and values computed from them.

export interface Line {
  readonly step: number;
  readonly loss?: number;
  readonly rate?: number;
  readonly tokens_per_second?: number;
  readonly seconds?: number;
  readonly valid?: Readonly<Record<string, number>>;
  readonly sample?: string;
}

export interface About {
  readonly name: string;
  readonly steps: number | null;
  readonly task: string | null;
  readonly head: string | null;
}

/** A response of /api/run. */
export type Answer = { readonly run: null } | News;

export interface News {
  readonly run: About;
  readonly start: number;
  readonly end: number;
  readonly mark: string;
  readonly more: boolean;
  readonly age: number | null;
  readonly lines: readonly Line[];
}

export interface Point {
  readonly step: number;
  readonly value: number;
}

export interface Sample {
  readonly step: number;
  readonly text: string;
}

/** Everything received so far. */
export interface Run {
  readonly about: About;
  readonly train: readonly Point[];
  readonly valid: readonly Point[];
  readonly speed: readonly Point[];
  readonly rate: readonly Point[];
  readonly samples: readonly Sample[];
  /** Training time in seconds. */
  readonly seconds: number;
  readonly step: number;
  readonly age: number | null;
}

/** The run after a response. Lines that start at 0 replace everything received before. */
export function addNews(before: Run | undefined, news: News): Run {
  const { run: about, age } = news;
  const old = news.start > 0 ? before : undefined;
  const points = (was: readonly Point[] | undefined, pick: (line: Line) => number | undefined): readonly Point[] => {
    const found = news.lines.flatMap((line) => {
      const value = pick(line);
      return value === undefined ? [] : [{ step: line.step, value }];
    });
    return found.length || !was ? [...(was ?? []), ...found] : was;
  };
  const samples = news.lines.flatMap(({ step, sample }) => (sample === undefined ? [] : [{ step, text: sample }]));
  const seconds = news.lines.reduce((last, line) => line.seconds ?? last, old?.seconds ?? 0);
  return {
    about,
    train: points(old?.train, (line) => line.loss),
    valid: points(old?.valid, (line) => line.valid?.["loss"]),
    speed: points(old?.speed, (line) => line.tokens_per_second),
    rate: points(old?.rate, (line) => line.rate),
    samples: [...(old?.samples ?? []), ...samples],
    seconds,
    step: news.lines.reduce((last, line) => Math.max(last, line.step), old?.step ?? 0),
    age,
  };
}

export type State = "absent" | "training" | "silent" | "done";

/** The state of a run; silent if there was no line for much longer than usual. */
export function stateOf(run: Run): State {
  if (run.age === null) return "absent";
  if (run.about.steps !== null && run.step >= run.about.steps) return "done";
  return run.age > quiet(run) ? "silent" : "training";
}

/** Seconds without a line that are normal, because of validation and samples. */
function quiet({ seconds, train }: Run): number {
  const between = train.length ? seconds / train.length : 0;
  return Math.max(30, 10 * between);
}

/** Estimated seconds to the last step. */
export function timeLeft({ about, step, seconds }: Run): number | undefined {
  if (about.steps === null || !step || !seconds) return undefined;
  return Math.max(0, ((about.steps - step) * seconds) / step);
}

/** The lowest validation loss, the first of equals. */
export function best({ valid }: Run): Point | undefined {
  return valid.reduce<Point | undefined>((a, b) => (a && a.value <= b.value ? a : b), undefined);
}

/** The last point at or before a step, by bisection. */
export function at<T extends { readonly step: number }>(points: readonly T[], step: number): T | undefined {
  let [low, high] = [0, points.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((points[middle]?.step ?? Infinity) <= step) low = middle + 1;
    else high = middle;
  }
  return points[low - 1];
}

/** Reduce to about `count` points that keep every peak: first, minimum, maximum and last of each interval. */
export function thin(points: readonly Point[], count: number): readonly Point[] {
  if (points.length <= count) return points;
  const stretch = Math.ceil(points.length / Math.max(1, Math.floor(count / 4)));
  const kept: Point[] = [];
  for (let from = 0; from < points.length; from += stretch) {
    const part = points.slice(from, from + stretch);
    const sorted = [...part].sort((a, b) => a.value - b.value);
    const chosen = new Set([part[0], sorted[0], sorted.at(-1), part.at(-1)]);
    kept.push(...part.filter((point) => chosen.has(point)));
  }
  return kept;
}

/** "1:05", "1:01:40". */
export function clock(seconds: number): string {
  const all = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  const two = (x: number): string => String(x).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** Replace control characters, bidirectional ones too, of sample text. */
export function legible(text: string): string {
  return text.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) =>
    c === "\t" ? "\t" : "\ufffd",
  );
}
