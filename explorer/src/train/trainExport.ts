// The memory of the loss, tensor by tensor, and the run so far.

import { runnable } from "../export/runnable";
import type { Table } from "../export/csv";
import { shell } from "../export/quote";
import { fill, type Strings } from "../i18n/strings";
import type { About, CodeLines } from "../ui/exportPanel";
import { grouped } from "../ui/format";
import { memory, pythonOf, showBytes, stepOf, total, type Sizes, type Tensor } from "./lossMemory";
import { at, best, type Run } from "./trainingRun";

/** What a picture belongs to: the sizes of the loss, and the run. */
export function trainAbout(sizes: Sizes, run: Run | null | undefined): About {
  const { vocab, width, tokens, dtype, maxBytes } = sizes;
  const settings = [
    `V = ${grouped(vocab)}`,
    `D = ${grouped(width)}`,
    `N = ${grouped(tokens)}`,
    dtype,
    `max_bytes = ${showBytes(maxBytes)}`,
    ...(run ? [`lmhead train --out ${run.about.name}`] : []),
  ];
  return { models: [], prompt: "", settings: settings.join(" · ") };
}

/** `run`, `step`, `best_step`, `best_loss`, `seconds` are as in `lmhead train --json`. */
export function trainDocument(sizes: Sizes, run: Run | null | undefined): object {
  const { dense, streamed, plan, results } = memory(sizes);
  const way = (tensors: readonly Tensor[]): object => ({
    bytes: total(tensors),
    tensors: tensors.map(({ name, shape, dtype, bytes }) => ({ name, shape: shape || null, dtype, bytes })),
  });
  const found = run ? best(run) : undefined;
  return {
    memory: {
      vocab_size: sizes.vocab,
      hidden_size: sizes.width,
      tokens: sizes.tokens,
      dtype: sizes.dtype,
      max_bytes: sizes.maxBytes,
      dense: way(dense),
      streamed: way(streamed),
      plan: {
        chunk_rows: plan.chunkRows,
        tile_tokens: plan.tileTokens,
        retained: plan.retained,
        bytes: plan.bytes,
      },
      results,
    },
    run: run?.about.name ?? null,
    ...(run && {
      step: run.step,
      steps: run.about.steps,
      best_step: found?.step ?? null,
      best_loss: found?.value ?? null,
      seconds: run.seconds,
      train: run.train.map(({ step, value }) => ({ step, loss: value })),
      valid: run.valid.map(({ step, value }) => ({ step, loss: value })),
      samples: run.samples,
    }),
  };
}

/** The run, if there is one; the memory; the samples. */
export function trainTables(sizes: Sizes, run: Run | null | undefined, { cost, watch }: Strings["train"]): Table[] {
  const { dense, streamed } = memory(sizes);
  const tables: Table[] = [];
  if (run?.train.length) {
    const steps = [...new Set([...run.train, ...run.valid].map(({ step }) => step))].sort((a, b) => a - b);
    const here = (points: Run["train"], step: number): number | null => {
      const point = at(points, step);
      return point?.step === step ? point.value : null;
    };
    tables.push({
      title: `${watch.curve} · ${run.about.name}`,
      columns: ["step", "train_loss", "valid_loss", "learning_rate", "tokens_per_second"],
      rows: steps.map((step) => [
        step,
        here(run.train, step),
        here(run.valid, step),
        here(run.rate, step),
        here(run.speed, step),
      ]),
    });
  }
  tables.push({
    title: fill(cost.summary, {
      n: grouped(sizes.tokens),
      dense: showBytes(total(dense)),
      streamed: showBytes(total(streamed)),
    }),
    columns: ["way", "tensor", "shape", "dtype", "bytes"],
    rows: Object.entries({ dense, streamed }).flatMap(([way, tensors]) =>
      tensors.map(({ name, shape, dtype, bytes }) => [way, name, shape, dtype, bytes]),
    ),
  });
  if (run?.samples.length)
    tables.push({
      title: watch.samples,
      columns: ["step", "sample"],
      rows: run.samples.map(({ step, text }) => [step, text]),
    });
  return tables;
}

/** The numbers and the training step in Python; the run as a command. */
export function trainLines(sizes: Sizes, run: Run | null | undefined): CodeLines {
  const name = run?.about.name ?? "run";
  return {
    python: runnable(`${pythonOf(sizes).code}\n\n${stepOf(sizes)}`),
    command: run?.age == null ? trainCommand(name) : `lmhead explore --run ${shell(name)}`,
  };
}

export function trainCommand(name: string): string {
  return `lmhead train book.txt --out ${shell(name)} --preset cpu-small`;
}
