// Attention uses the same softmax: weights of the positions read so far.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { softmax } from "../math/softmax";
import { Bars } from "../ui/bars";
import { fixed } from "../ui/format";
import { Formula, frac, i, o, row, sqrt, sup } from "../ui/formula";
import { Step } from "./learnStep";
import { attentionScores } from "./learnPython";
import { KEYS } from "./toyModel";
import type { Learn } from "./useLearn";

export function Attention({ learn }: { learn: Learn }): JSX.Element {
  const { attention: s, common } = useStrings();
  const scores = attentionScores(learn);
  const shares = softmax(scores);
  return (
    <Step
      id="attention"
      texts={s}
      learn={learn}
      formula={
        <Formula label="weights are the softmax of q times K transposed over the root of d">
          {row(i("softmax"), row(o("("), frac([i("q"), sup(i("K"), i("⊤"))], sqrt(i("d"))), o(")")))}
        </Formula>
      }
    >
      <Bars
        name="attention"
        caption={s.keys}
        heads={["", "k", s.score, s.share]}
        domain={[0, 1]}
        rows={shares.map((value, at) => ({
          head: String(at + 1),
          cells: [(KEYS[at] ?? []).map((x) => fixed(x, 1)).join(", "), fixed(scores[at] ?? NaN), fixed(value, 3)],
          value,
        }))}
        footHead={common.sum}
        foot={["", "", fixed(1, 3)]}
      />
    </Step>
  );
}
