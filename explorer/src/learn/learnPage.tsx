// The Learn page: steps that build on each other, with live numbers.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { ExportPanel } from "../ui/exportPanel";
import { Chain } from "./samplerStep";
import { Compare } from "./alternativesStep";
import { Draw } from "./drawStep";
import { learnAbout, learnDocument, learnLines, learnTables } from "./learnExport";
import { Hidden } from "./hiddenStep";
import { Linear } from "./linearStep";
import { Logits } from "./logitsStep";
import { Loss } from "./lossStep";
import { Stable } from "./overflowStep";
import { StepNumber } from "./learnStep";
import { Attention } from "./attentionStep";
import { Backward } from "./backwardStep";
import { Bias } from "./biasStep";
import { Jacobian } from "./jacobianStep";
import { Norms } from "./normsStep";
import { Translation } from "./translationStep";
import { Initial } from "./initialStep";
import { STEP_IDS, type StepId } from "./learnPython";
import { useLearn, type Learn } from "./useLearn";
import { WhyLogits } from "./whyLogitsStep";
import { Temperature } from "./temperatureStep";
import { TreeStep } from "./treeStep";

const STEPS: Readonly<Record<StepId, (props: { learn: Learn }) => JSX.Element>> = {
  hidden: Hidden,
  norms: Norms,
  linear: Linear,
  bias: Bias,
  initial: Initial,
  logits: Logits,
  stable: Stable,
  temperature: Temperature,
  chain: Chain,
  draw: Draw,
  loss: Loss,
  backward: Backward,
  jacobian: Jacobian,
  whylogits: WhyLogits,
  compare: Compare,
  attention: Attention,
  tree: TreeStep,
  translation: Translation,
};

/** The charts of all steps under their titles, but for tables that are folded. */
const CHARTS = ".step > .text-column > h2, .step .play :is(table, svg):not(details *)";

export function LearnPage(): JSX.Element {
  const learn = useLearn();
  const strings = useStrings();
  return (
    <>
      <header class="intro">
        <p class="sentence">{strings.sentence}</p>
        <h1>{strings.intro.title}</h1>
        <p class="lead">{strings.intro.lead}</p>
        <p class="note">{strings.intro.how}</p>
      </header>
      <nav class="contents" aria-label={strings.frame.contents}>
        <ol>
          {STEP_IDS.map((id) => (
            <li key={id}>
              <a href={`#${id}`}>{strings[id].title}</a>
            </li>
          ))}
        </ol>
      </nav>
      {STEP_IDS.map((id, at) => {
        const StepView = STEPS[id];
        return (
          <StepNumber.Provider key={id} value={at + 1}>
            <StepView learn={learn} />
          </StepNumber.Provider>
        );
      })}
      <ExportPanel
        name="learn"
        title={strings.intro.title}
        document={() => learnDocument(learn, strings)}
        tables={() => learnTables(learn, strings)}
        charts={CHARTS}
        about={learnAbout(learn, strings)}
        lines={() => learnLines(learn)}
      />
    </>
  );
}
