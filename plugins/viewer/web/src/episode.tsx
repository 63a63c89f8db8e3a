import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, type Episode as EpisodeType, type EpisodeRecord, type Message, type OutsideCall, type Report, type Run, type Tokens, type Turn } from "./api";
import { Copy, Fact, Problem, Status, Text, useKeys, useLoaded } from "./parts";
import { Paths } from "./paths";
import { divide, Picture, type Source, withoutPictures } from "./pictures";
import { link, type Place } from "./router";
import { asText, cut, literal, number, seconds, shorten } from "./text";
import { EpisodeTime } from "./time";
import { limitOf, TokenView } from "./tokens";

export function Episode({ place, run }: { place: Place; run: Run }) {
  const key = place.query.get("key") ?? "";
  const number_ = Number(place.query.get("record") ?? 0);
  const view = place.query.get("view") ?? "turns";
  const { value: episode, error } = useLoaded<EpisodeType>(`runs/${place.run}/episode`, { key });
  const record = episode?.records[number_];
  const needsTokens = (view === "tokens" || view === "paths") && record !== undefined;
  const tokens = useLoaded<Tokens>(needsTokens ? `runs/${place.run}/tokens` : null, { key, record: number_ });
  if (!episode || episode.key !== key) return <Problem text={error} />;
  const hasPaths = record?.segments.some((each) => each.block >= 0) ?? false;
  const views: [string, string][] = [["turns", "Turns"], ["tokens", "Tokens"], ...(hasPaths ? ([["paths", "Paths"]] as [string, string][]) : []), ["time", "Time"], ["data", "Data"]];
  return (
    <article class="episode" aria-labelledby="heading">
      <Head episode={episode} run={place.run} />
      {episode.records.length > 1 && <Records episode={episode} chosen={number_} place={place} view={view} />}
      <nav class="tabs" aria-label="Ways to see the episode">
        {views.map(([name, title]) => (
          <a href={link(place.run, "episode", { key, record: number_ || undefined, view: name })} aria-current={view === name ? "page" : undefined}>
            {title}
          </a>
        ))}
        <span class="grow" />
        <Copy label="Copy as JSON" text={() => JSON.stringify(episode, null, 2)} />
        <Copy label="Copy messages" text={() => JSON.stringify(episode.messages, null, 2)} />
        <Copy label="Copy as a test" text={async () => (await get<{ source: string }>(`runs/${place.run}/case`, { key })).source} />
      </nav>
      <Problem text={error || tokens.error} />
      {view === "turns" && <Turns key={`${key} ${number_}`} episode={episode} record={record} chosen={place.query.get("turn")} place={place} />}
      {view === "time" && <EpisodeTime episode={episode} run={place.run} revision={run.revision} />}
      {view === "data" && <Text text={JSON.stringify({ ...episode, records: undefined, messages: undefined }, null, 2)} label="Data of the episode" />}
      {needsTokens && !tokens.value && !tokens.error && <p class="dim">Loading tokens…</p>}
      {needsTokens && tokens.value && tokens.value.ids.length === record.num_tokens && (
        <>
          {view === "tokens" && <TokenView key={`${key} ${number_}`} tokens={tokens.value} record={record} source={{ run: place.run, episode }} start={place.query.has("token") ? Number(place.query.get("token")) : null} />}
          {view === "paths" && <Paths tokens={tokens.value} record={record} />}
        </>
      )}
    </article>
  );
}

function Head({ episode, run }: { episode: EpisodeType; run: number }) {
  const { metrics } = episode;
  const rest = Math.max(0, metrics.total_s - metrics.llm_s - metrics.tool_s - metrics.reward_s);
  return (
    <header>
      <p class="crumbs">
        <a href={link(run, "episodes")}>Episodes</a> /{" "}
        <a href={link(run, "groups", { uid: episode.uid })}>task {literal(episode.uid)}</a>
      </p>
      <h1 id="heading">
        {literal(episode.key)} <Status status={episode.status} />
      </h1>
      {episode.fault && <Problem text={`${episode.fault.owner}: ${episode.fault.kind}: ${episode.fault.message}`} />}
      {episode.limit && (
        <p>
          ended: {literal(episode.limit.reason)} ({literal(episode.limit.name)}
          {episode.limit.value !== null && `: ${number(episode.limit.value)}`})
        </p>
      )}
      <dl class="facts">
        <Fact name="reward" title="sum over all records">
          <b>{number(episode.reward)}</b>
        </Fact>
        {metrics.tool_reward !== 0 && <Fact name="of tools">{number(metrics.tool_reward)}</Fact>}
        {partsOf(episode.records).map(([name, value]) => (
          <Fact name={literal(name)} title="part of the reward, as the reward function reported it; the sum over all records">
            {number(value)}
          </Fact>
        ))}
        <Fact name="expected">
          <bdi>{shorten(asText(episode.task.ground_truth), 200) || "–"}</bdi>
        </Fact>
        <Fact name="agent">{literal(episode.agent_name)}</Fact>
        {episode.replicas && episode.replicas.length > 0 && (
          <Fact name={episode.replicas.length > 1 ? "replicas" : "replica"} title={`engines that sampled its turns, in order; run by ${literal(episode.worker || "this process")}`}>
            {episode.replicas.join(", ")}
          </Fact>
        )}
        <Fact name="turns">{metrics.num_turns}</Fact>
        <Fact name="tool calls">
          {metrics.num_tool_calls}
          {metrics.num_tool_errors > 0 && <span class="bad"> ({metrics.num_tool_errors} ✗)</span>}
        </Fact>
        {Object.entries(metrics.num_tokens).map(([name, count]) => count > 0 && <Fact name={`${name} tokens`}>{number(count)}</Fact>)}
        <Fact name="time" title={`model ${seconds(metrics.llm_s)}, tools ${seconds(metrics.tool_s)}, reward ${seconds(metrics.reward_s)}, rest ${seconds(rest)}`}>
          {seconds(metrics.total_s)}
        </Fact>
        {episode.global_step > 0 && (
          <Fact name="step">
            <a href={link(run, "episodes", { step: episode.global_step })}>{episode.global_step}</a>
          </Fact>
        )}
      </dl>
    </header>
  );
}

/** The parts of the rewards of some records: the sum of each name. */
function partsOf(records: EpisodeRecord[]): [string, number][] {
  const parts = new Map<string, number>();
  for (const record of records) {
    for (const [name, value] of Object.entries(record.score?.extra ?? {})) {
      if (typeof value === "number") parts.set(name, (parts.get(name) ?? 0) + value);
    }
  }
  return [...parts];
}

/** The reasons of the gateway for a new record, in words. */
const REASONS: Record<string, string> = {
  foreign_turn: "a turn of the model was changed",
  tools: "it has other tools",
  template: "the template cannot append its messages",
  history: "its conversation is rendered differently",
  inside: "it continues from an earlier turn",
  busy: "it was asked while another call ran",
  sibling: "the same request was asked again",
  no_new_message: "it has no new message",
};

function Records({ episode, chosen, place, view }: { episode: EpisodeType; chosen: number; place: Place; view: string }) {
  const children = (parent: number | null): EpisodeRecord[] => episode.records.filter((each) => (each.lineage?.parent ?? null) === parent);
  const branch = (record: EpisodeRecord) => (
    <li>
      <a href={link(place.run, "episode", { key: episode.key, record: record.index || undefined, view })} aria-current={record.index === chosen ? "true" : undefined}>
        record {record.index}: {literal(record.lineage?.kind ?? "main")}
      </a>{" "}
      <span class="dim">
        {number(record.num_tokens)} tokens
        {record.lineage && record.lineage.num_shared_tokens > 0 && `, the first ${record.lineage.num_shared_tokens} from its parent`}
        {record.lineage && !record.lineage.trained && ", not trained"}
        {record.score && partsOf([record]).map(([name, value]) => `, ${literal(name)} ${number(value)}`)}
        {record.score && `, reward ${number(record.score.values.reduce((sum, each) => sum + each, 0))}`}
      </span>
      {record.lineage?.label && <em> {REASONS[record.lineage.label] ?? literal(record.lineage.label)}</em>}
      {children(record.index).length > 0 && <ul>{children(record.index).map(branch)}</ul>}
    </li>
  );
  return (
    <nav class="records" aria-label="Records of the episode">
      <ul>{children(null).map(branch)}</ul>
    </nav>
  );
}

function Turns({ episode, record, chosen, place }: { episode: EpisodeType; record: EpisodeRecord | undefined; chosen: string | null; place: Place }) {
  const messages = episode.messages.length ? episode.messages : episode.task.messages;
  const answers = useMemo(() => messages.flatMap((each, index) => (each.role === "assistant" ? [index] : [])), [messages]);
  const answered = answers.length > 0;
  // The answers after the task are the turns of a record, unless an agent rewrote the messages.
  const isUsedUp = episode.response_budget !== null && episode.records.some((each) => each.num_tokens - each.num_prompt_tokens >= episode.response_budget!);
  const own = answers.slice(episode.task.messages.filter((each) => each.role === "assistant").length);
  const here = { key: episode.key, record: record?.index || undefined };
  const turnOf = (index: number): Turn | undefined => (record && own.length === record.turns.length ? record.turns[own.indexOf(index)] : undefined);
  const tokensOf = (index: number): string | undefined => {
    if (!turnOf(index)) return undefined;
    return link(place.run, "episode", { ...here, view: "tokens", token: turnOf(index)![0] });
  };
  const [unfolded, setUnfolded] = useState(false);
  const hasTools = messages.some((each) => each.role === "tool" || (each.tool_calls?.length ?? 0) > 0);
  useKeys((event) => {
    if (event.key === "f" && hasTools) setUnfolded(!unfolded);
  });
  return (
    <div class="turns">
      {hasTools && (
        <p class="fold">
          <button onClick={() => setUnfolded(!unfolded)}>{unfolded ? "Fold" : "Unfold"} tool calls and results</button>
        </p>
      )}
      {messages.map((message, index) => (
        <MessageView unfolded={unfolded} source={{ run: place.run, episode }} message={message} index={index} chosen={String(index) === chosen} address={link(place.run, "episode", { ...here, turn: index })} tokens={tokensOf(index)} limit={limitOf(episode, turnOf(index))} />
      ))}
      {episode.records.length > 1 && record && record.response_text !== null && <RecordText record={record} />}
      {!answered && record?.response_text && (
        <section class="message assistant" aria-label="Response">
          <h2>response, as sampled</h2>
          <Text text={record.response_text} />
        </section>
      )}
      {episode.reports.length > 0 && <Reports reports={episode.reports} />}
      {episode.outside_calls.length > 0 && <OutsideCalls calls={episode.outside_calls} />}
      {(episode.status === "truncated" || episode.status === "timed_out") && (
        <p class="cut">✂ The episode was {episode.status === "timed_out" ? "stopped by its deadline" : isUsedUp ? `truncated: it used its budget of ${number(episode.response_budget)} response tokens` : "truncated: it reached a limit of tokens or turns"}.</p>
      )}
    </div>
  );
}

function MessageView({ unfolded, source, message, index, chosen, address, tokens, limit }: { unfolded: boolean; source: Source; message: Message; index: number; chosen: boolean; address: string; tokens: string | undefined; limit: string }) {
  const own = useRef<HTMLElement>(null);
  useEffect(() => {
    if (chosen) own.current?.scrollIntoView({ block: "center" });
  }, [chosen]);
  const role = String(message.role ?? "?");
  const content = withoutPictures(message.content);
  const isTool = role === "tool";
  const title = (
    <>
      {literal(role)}
      {message.name && <span class="name"> {literal(message.name)}</span>}
      {limit && <span class="limit"> ✂ {limit}</span>}
    </>
  );
  return (
    <section ref={own} class={`message ${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}${chosen ? " chosen" : ""}`} aria-label={`${role} message ${index}`}>
      <span class="anchors">
        {tokens && (
          <a href={tokens} aria-label={`tokens of message ${index}`}>
            tokens
          </a>
        )}
        <a href={address} aria-label={`link to message ${index}`}>
          #{index}
        </a>
      </span>
      {isTool ? (
        <details open={unfolded}>
          <summary>
            <h2>{title}</h2> <Preview text={content} /> <span class="dim">{number(content.length)} characters</span>
          </summary>
          <Content content={message.content} source={source} />
        </details>
      ) : (
        <>
          <h2>{title}</h2>
          {message.reasoning_content !== undefined && message.reasoning_content !== null && (
            <details>
              <summary>reasoning</summary>
              <Text text={asText(message.reasoning_content)} />
            </details>
          )}
          {content && <Content content={message.content} source={source} />}
        </>
      )}
      {message.tool_calls?.map((call) => (
        <details class="call" open={unfolded}>
          <summary>
            call <code>{literal(call.function?.name ?? "?")}</code> <Preview text={prettyArguments(call.function?.arguments)} />
          </summary>
          <Text text={prettyArguments(call.function?.arguments)} />
        </details>
      ))}
    </section>
  );
}

/** The content of a message: texts, with the pictures between them. */
function Content({ content, source }: { content: unknown; source: Source }) {
  const parts = divide(content);
  if (parts === null) return <Text text={asText(content)} />;
  return <>{parts.map((part) => (typeof part === "string" ? <Text text={part} /> : <Picture key={part.url} url={part.url} source={source} />))}</>;
}

/** Calls of the agent's program to other models: context for people, which no record has. */
function OutsideCalls({ calls }: { calls: OutsideCall[] }) {
  return (
    <section class="outside" aria-label="Calls to other models">
      <h2>calls to other models</h2> <span class="dim">not trained; no record has them</span>
      {calls.map((call, index) => (
        <details class="message other" aria-label={`call ${index} to another model`}>
          <summary>
            <h2 class="name">{literal(call.model)}</h2> <Preview text={call.answer} />{" "}
            <span class={call.status >= 400 || call.status === 0 ? "bad" : "dim"}>
              {call.status ? `status ${call.status}` : "no response"}, after {call.num_turns} {call.num_turns === 1 ? "turn" : "turns"}
            </span>
          </summary>
          {call.messages.map((message) => (
            <>
              <h3>{literal(message.role ?? "?")}</h3>
              <Text text={asText(message.content)} />
            </>
          ))}
          <h3>answer</h3>
          <Text text={call.answer} />
          <details>
            <summary>request and response of {literal(call.path)} as sent</summary>
            <Text text={call.request} />
            <Text text={call.response} />
          </details>
        </details>
      ))}
    </section>
  );
}

/** Commands with their output, and reports of tests: texts for people, which no record has. */
function Reports({ reports }: { reports: Report[] }) {
  return (
    <section class="outside" aria-label="Reports">
      <h2>reports</h2> <span class="dim">for people; the model reads the results of its tools above</span>
      {reports.map((report, index) => (
        <details class="message other" aria-label={`report ${index}`}>
          <summary>
            <h2 class="name">
              <bdi>{literal(shorten(report.title.split("\n", 1)[0], PREVIEW))}</bdi>
            </h2>{" "}
            {Object.entries(report.facts).map(([name, value]) => (
              <span class={report.failed ? "bad" : "dim"}>
                {literal(name)} {typeof value === "number" ? number(value) : literal(asText(value))},{" "}
              </span>
            ))}
            <span class="dim">
              after {report.num_turns} {report.num_turns === 1 ? "turn" : "turns"}
            </span>
          </summary>
          {(report.title.includes("\n") || report.title.length > PREVIEW) && <Text text={report.title} />}
          {report.text === "" ? <p class="dim">no text</p> : <Text text={report.text} />}
        </details>
      ))}
    </section>
  );
}

/** The exact text of one of several records: the messages are those of one of them, or of none. */
function RecordText({ record }: { record: EpisodeRecord }) {
  return (
    <details class="message" key={record.index} open={record.index > 0}>
      <summary>
        <h2>text of record {record.index}</h2> <span class="dim">{number(record.num_tokens)} tokens</span>
      </summary>
      <Text text={(record.prompt_text ?? "") + (record.response_text ?? "")} label={`Text of record ${record.index}`} />
    </details>
  );
}

const PREVIEW = 100;

/** The beginning of a folded text. */
function Preview({ text }: { text: string }) {
  const line = cut(text, PREVIEW).split("\n", 1)[0];
  return (
    <code class="preview">
      <bdi>{literal(line)}</bdi>
      {line.length < text.length && " …"}
    </code>
  );
}

function prettyArguments(value: unknown): string {
  if (typeof value !== "string") return asText(value);
  try {
    const found = JSON.parse(value);
    // A call with one text, such as a program, reads best as that text.
    const entries = Object.entries(found);
    return entries.map(([name, each]) => (typeof each === "string" && each.includes("\n") ? `${name}:\n${each}` : `${name}: ${JSON.stringify(each)}`)).join("\n");
  } catch {
    return value;
  }
}
