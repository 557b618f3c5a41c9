/* Sessions of the store: resume after a lost connection or a killed server, trimming of the kept
 * results by first_unacked, and fencing of writers by generation.
 *
 * One server with a durable part (what a commit has written) and a volatile part (what it has
 * executed since); a writer of generation 1 and one that starts when it has heard of generation 2. The
 * network is worse than TCP: what was sent on a replaced connection may still arrive, at any time
 * and beside the new connection, until the server is killed.
 *
 * Claims, as assertions:
 *   at most once         no request is executed twice, or executed after its result was trimmed
 *   acknowledged = kept  an acknowledged request is in the durable part, for good
 *   fenced = silent      nobody has a write executed under a generation older than one heard of
 *   no wait without end  there is no state in which a writer waits and nothing can happen
 *
 * Planted errors, each of which must be found (check.sh):
 *   SPLIT_TRANSACTION    mutation and kept result are two transactions
 *   ANSWER_EARLY         the answer leaves before the commit
 *   NO_STALE_CHECK       a request below the trimming point is executed like a new one
 *   EAGER_TRIM           the client reports requests as answered once they are sent
 *   RETRY_UNKNOWN        the client sends again although the server has forgotten the session
 *   KNOWN_FLAG           Welcome says "known" instead of which birth of the session: when the one
 *                        that says "not known" is lost, the next Hello finds the session that the
 *                        lost one has made
 *   TELL_EARLY           the generation is told before it is durable
 */

#ifndef CUTS
#define CUTS 2      /* Lost connections, of each writer. */
#endif
#ifndef CRASHES
#define CRASHES 2
#endif
#ifndef REQUESTS
#define REQUESTS 3  /* Of each writer. */
#endif
#ifndef FORGETS
#define FORGETS 1   /* The session of the first writer is forgotten so often. */
#endif
#ifndef WRITERS
#define WRITERS 2
#endif
#define WINDOW 2    /* Requests in flight. */
#define ROW(w, seq) ((w) * (REQUESTS + 1) + (seq))
#define ROWS (2 * (REQUESTS + 1))
/* The channel of writer w for connections of this parity: the other one holds late frames. */
#define LINE(w, parity) ((w) * 2 + (parity))

mtype = { HELLO, REQUEST, WELCOME, UNKNOWN, DONE, FENCED, STALE };

/* To the server: kind, seq, first_unacked, generation. To a writer: kind, seq; of WELCOME instead
 * of seq the birth number of the session. */
chan up[4] = [WINDOW + 1] of { mtype, byte, byte, byte };
chan down[2] = [WINDOW + 2] of { mtype, byte };
bit parity[2];  /* Of the present connection. */
bit broken[2];  /* The connection is gone and the writer has not noticed. */

/* What the server holds in memory, and what it would find after being killed. */
bit applied[ROWS], durable_applied[ROWS];
bit kept[ROWS], durable_kept[ROWS];
byte trim[2], durable_trim[2];
bit known[2], durable_known[2];
byte births[2], durable_births[2];  /* Of sessions with this name, so far. */
byte generation = 1, wanted = 1, durable_generation = 1;
bit owed[ROWS];  /* An answer is due at the next commit. */

byte heard = 1;            /* The highest generation that anybody was told. */

byte crashes = 0;
byte forgotten = 0;

inline clear_line(c) {
  do
  :: len(c) > 0 -> c?_, _, _, _
  :: len(c) == 0 -> break
  od
}

/* An answer to a writer whose connection is gone is lost. */
inline answer(w, kind, seq) {
  if
  :: broken[w] || len(down[w]) == WINDOW + 2 -> skip
  :: !broken[w] && len(down[w]) < WINDOW + 2 -> down[w]!kind, seq
  fi
}

inline execute(w, seq, first_unacked, gen) {
  if
  :: trim[w] < first_unacked ->
       trim[w] = first_unacked;
       i = 1;
       do
       :: i < first_unacked && i <= REQUESTS -> kept[ROW(w, i)] = 0; i++
       :: else -> break
       od
  :: else -> skip
  fi;
  if
  :: !known[w] -> answer(w, UNKNOWN, seq)
  :: known[w] && kept[ROW(w, seq)] -> owed[ROW(w, seq)] = 1
#ifndef NO_STALE_CHECK
  :: known[w] && !kept[ROW(w, seq)] && seq < trim[w] -> answer(w, STALE, seq)
  :: known[w] && !kept[ROW(w, seq)] && seq >= trim[w] ->
#else
  :: known[w] && !kept[ROW(w, seq)] ->
#endif
       if
       :: gen < generation -> answer(w, FENCED, seq)
       :: else ->
            assert(!applied[ROW(w, seq)]);
            assert(gen >= heard);
            applied[ROW(w, seq)] = 1;
            kept[ROW(w, seq)] = 1;
            owed[ROW(w, seq)] = 1;
#ifdef ANSWER_EARLY
            owed[ROW(w, seq)] = 0;
            answer(w, DONE, seq)
#endif
       fi
  fi
}

inline receive(w, line) {
  if
  :: up[line]?HELLO, _, _, _ ->
#ifdef KNOWN_FLAG
       answer(w, WELCOME, known[w]);
       known[w] = 1
#else
       if
       :: !known[w] -> known[w] = 1; births[w]++
       :: else -> skip
       fi;
       answer(w, WELCOME, births[w])
#endif
  :: up[line]?REQUEST, seq, first, gen -> execute(w, seq, first, gen)
  fi
}

/* The second half of a commit, unless it is planted to be a transaction of its own. */
inline copy_results() {
  i = 0;
  do
  :: i < ROWS -> durable_kept[i] = kept[i]; i++
  :: else -> break
  od
}

inline commit() {
  i = 0;
  do
  :: i < ROWS -> durable_applied[i] = applied[i]; i++
  :: else -> break
  od;
#ifndef SPLIT_TRANSACTION
  copy_results();
#endif
  durable_trim[0] = trim[0]; durable_trim[1] = trim[1];
  durable_known[0] = known[0]; durable_known[1] = known[1];
  durable_births[0] = births[0]; durable_births[1] = births[1];
  durable_generation = wanted;
  generation = wanted
}

inline after_commit() {
  heard = (durable_generation > heard -> durable_generation : heard);
  i = 1;
  do
  :: i <= REQUESTS ->
       if
       :: owed[ROW(0, i)] -> owed[ROW(0, i)] = 0; answer(0, DONE, i)
       :: else -> skip
       fi;
       if
       :: owed[ROW(1, i)] -> owed[ROW(1, i)] = 0; answer(1, DONE, i)
       :: else -> skip
       fi;
       i++
  :: else -> break
  od
}

/* Killed and started again: memory is what was durable, every connection is gone. */
inline restart() {
  i = 0;
  do
  :: i < ROWS ->
       applied[i] = durable_applied[i];
       kept[i] = durable_kept[i];
       owed[i] = 0;
       i++
  :: else -> break
  od;
  trim[0] = durable_trim[0]; trim[1] = durable_trim[1];
  known[0] = durable_known[0]; known[1] = durable_known[1];
  births[0] = durable_births[0]; births[1] = durable_births[1];
  generation = durable_generation; wanted = durable_generation;
  broken[0] = 1; broken[1] = 1;
  clear_line(up[0]); clear_line(up[1]); clear_line(up[2]); clear_line(up[3]);
  i = 0
}

active proctype Server() {
  byte i, seq, first, gen;
end:
  do
  :: d_step { nempty(up[0]) -> receive(0, 0); i = 0; seq = 0; first = 0; gen = 0 }
  :: d_step { nempty(up[1]) -> receive(0, 1); i = 0; seq = 0; first = 0; gen = 0 }
  :: d_step { nempty(up[2]) -> receive(1, 2); i = 0; seq = 0; first = 0; gen = 0 }
  :: d_step { nempty(up[3]) -> receive(1, 3); i = 0; seq = 0; first = 0; gen = 0 }
#ifdef SPLIT_TRANSACTION
  :: d_step { commit(); i = 0 };
     if
     :: d_step { copy_results(); after_commit(); i = 0 }
     :: d_step { crashes < CRASHES -> crashes++; restart() }
     fi
#else
  :: d_step { commit(); after_commit(); i = 0 }
#endif
  :: d_step { crashes < CRASHES -> crashes++; restart() }
     /* A member was lost: the next generation. */
  :: d_step { wanted == 1 -> wanted = 2;
#ifdef TELL_EARLY
       generation = 2;
       heard = 2
#endif
     }
     /* A session is forgotten an hour after its last connection ended, and no frame is late by an
      * hour. The deletion is a transaction of its own. */
  :: d_step { forgotten < FORGETS && known[0] && durable_known[0] -> forgotten++;
       known[0] = 0; durable_known[0] = 0;
       broken[0] = 1; clear_line(up[0]); clear_line(up[1]);
       i = 0;
       do
       :: i <= REQUESTS -> kept[ROW(0, i)] = 0; durable_kept[ROW(0, i)] = 0;
            owed[ROW(0, i)] = 0; i++
       :: else -> break
       od;
       trim[0] = 0; durable_trim[0] = 0; i = 0 }
  od
}

/* Connects; what was sent before may still be on its way. */
inline dial(w) {
  d_step {
    parity[w] = 1 - parity[w];
    clear_line(up[LINE(w, parity[w])]);
    do
    :: len(down[w]) > 0 -> down[w]?_, _
    :: len(down[w]) == 0 -> break
    od;
    broken[w] = 0;
    up[LINE(w, parity[w])]!HELLO, 0, 0, 0
  };
  welcomed = 0
}

inline send(w, seq) {
#ifdef EAGER_TRIM
  first_unacked = seq + 1;
#endif
  up[LINE(w, parity[w])]!REQUEST, seq, first_unacked, mine
}

proctype Writer(byte w; byte mine) {
  byte next = 1, first_unacked = 1, resend = 1, seq, cuts = 0;
  bit answered[REQUESTS + 2];
  bit welcomed = 0, over = 0;
  byte birth = 0;
  mine <= heard;  /* It learns its generation from the server. */
  dial(w);
  do
  :: broken[w] && !over -> dial(w)
  :: !over && cuts < CUTS -> cuts++; dial(w)
  :: !over && !broken[w] && nempty(down[w]) ->
       if
       :: down[w]?WELCOME, seq ->
#ifdef KNOWN_FLAG
            if
            :: birth > 0 && !seq -> over = 1
            :: else -> welcomed = 1; birth = 1; resend = first_unacked
            fi
#else
            if
#ifndef RETRY_UNKNOWN
            :: birth > 0 && seq != birth -> over = 1  /* What was in flight: outcome unknown. */
#endif
            :: else -> welcomed = 1; birth = seq; resend = first_unacked
            fi
#endif
       :: atomic { down[w]?DONE, seq ->
            assert(durable_applied[ROW(w, seq)]);
            answered[seq] = 1 }
       :: down[w]?FENCED, seq -> assert(mine < durable_generation); over = 1
       :: down[w]?STALE, seq -> assert(answered[seq])  /* Only what came late is stale. */
       :: down[w]?UNKNOWN, seq -> over = 1
       fi;
       seq = 0
  :: d_step { !over && first_unacked <= REQUESTS && answered[first_unacked] -> first_unacked++;
       resend = (resend < first_unacked -> first_unacked : resend) }
     /* What has no answer goes again, in order and before anything new. */
  :: d_step { !over && welcomed && !broken[w] && resend < next &&
         len(up[LINE(w, parity[w])]) <= WINDOW ->
       send(w, resend); resend++ }
  :: d_step { !over && welcomed && !broken[w] && resend == next && next <= REQUESTS &&
         next - first_unacked < WINDOW && len(up[LINE(w, parity[w])]) <= WINDOW ->
       send(w, next); next++; resend = next }
  :: over || first_unacked > REQUESTS -> break
  od
}

init {
  atomic {
    run Writer(0, 1);
#if WRITERS == 2
    run Writer(1, 2)
#endif
  }
}
