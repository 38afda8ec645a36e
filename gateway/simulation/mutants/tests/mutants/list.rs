//! Faults that the simulation must find, as edits of the product's files.

use super::edits::Edit;

/// A fault put into the product.
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    pub(crate) edits: &'static [Edit],
    /// The invariant that it breaks.
    pub(crate) invariant: &'static str,
}

pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "slot_of_a_cancelled_request_is_kept",
        edits: &[Edit {
            file: "agent/src/forward/mod.rs",
            from: "        sender.report_upload(Some(upload.taken()));\n    }\n}",
            to: "        sender.report_upload(Some(upload.taken()));\n    \
                 } else if MUTANT {\n        std::mem::forget(slot);\n    }\n}",
        }],
        invariant: "all is given back",
    },
    Mutant {
        name: "place_in_line_of_a_cancelled_request_is_kept",
        edits: &[Edit {
            file: "gateway/data-plane/src/tunnel/waiting.rs",
            from: "line.retain(|place| !Rc::ptr_eq(place, &self.place));",
            to: "line.retain(|place| MUTANT || !Rc::ptr_eq(place, &self.place));",
        }],
        invariant: "all is given back",
    },
    Mutant {
        name: "received_frame_wakes_no_sender",
        edits: &[Edit {
            file: "gateway/data-plane/src/pipe.rs",
            from: ".fetch_sub(frame.bytes(), Ordering::SeqCst);\n                \
                   self.shared.wake(false);",
            to: ".fetch_sub(frame.bytes(), Ordering::SeqCst);\n                \
                 if !MUTANT {\n                    self.shared.wake(false);\n                }",
        }],
        invariant: "all is given back",
    },
    Mutant {
        name: "mailbox_is_left_after_one_batch",
        edits: &[
            Edit {
                file: "gateway/base/src/mailbox.rs",
                from: "for _ in 0..limits::MAILBOX_BATCH {",
                to: "for _ in 0..if MUTANT { 2 } else { limits::MAILBOX_BATCH } {",
            },
            Edit {
                file: "gateway/base/src/mailbox.rs",
                from: "runtime::yield_now().await;\n            }\n        }",
                to: "runtime::yield_now().await;
                if MUTANT {
                    break 'mail;
                }
            }
        }",
            },
        ],
        invariant: "counters agree with records",
    },
    Mutant {
        name: "credit_is_granted_twice",
        edits: &[Edit {
            file: "shared/src/tunnel/endpoint/credit.rs",
            from: "            stream.settle();\n        }\n        grant\n    }",
            to: "            stream.settle();\n        }\n        \
                 if MUTANT { 2 * grant } else { grant }\n    }",
        }],
        invariant: "an error has a cause",
    },
    Mutant {
        name: "post_is_sent_again_after_bytes_left",
        edits: &[Edit {
            file: "gateway/data-plane/src/tunnel/attempt_budget.rs",
            from: "Transmission::MaybeSent => self.is_repeatable && ",
            to: "Transmission::MaybeSent => (self.is_repeatable || MUTANT) && ",
        }],
        invariant: "a POST is not doubled",
    },
    Mutant {
        name: "worker_ignores_directories",
        edits: &[Edit {
            file: "gateway/data-plane/src/worker/mod.rs",
            from: "WorkerMessage::Directory(directory) => self.use_directory(directory),",
            // The agents of the simulation come before.
            to: "WorkerMessage::Directory(directory) => {
                thread_local! {
                    static SEEN: Cell<(Option<Instant>, u32)> =
                        const { Cell::new((None, 0)) };
                }
                let (first, number) = SEEN.get();
                let first = first.unwrap_or_else(Instant::now);
                SEEN.set((Some(first), number + 1));
                let is_later = first.elapsed() > Duration::from_millis(400);
                if !(MUTANT && is_later && number % 2 == 1) {
                    self.use_directory(directory);
                }
            }",
        }],
        invariant: "a disabled key is refused at once",
    },
    Mutant {
        name: "connection_of_a_reset_request_is_used_again",
        edits: &[Edit {
            file: "agent/src/forward/mod.rs",
            from: "Err(ExchangeError::Reset) => {\n                lease.abort();",
            to: "Err(ExchangeError::Reset) => {\n                \
                 if MUTANT { lease.give_back(); } else { lease.abort(); }",
        }],
        invariant: "an upload arrives unchanged",
    },
    Mutant {
        name: "cancelled_request_is_not_recorded",
        edits: &[Edit {
            file: "gateway/data-plane/src/request_scope/mod.rs",
            from: "            self.observe(outcome);",
            to: "            if !(MUTANT && outcome == Outcome::CallerGone) {
                self.observe(outcome);
            }",
        }],
        invariant: "each request is recorded once",
    },
    Mutant {
        name: "request_is_recorded_twice",
        edits: &[Edit {
            file: "gateway/data-plane/src/request_scope/mod.rs",
            from: "if !self.reported.replace(true) {",
            to: "if !self.reported.replace(true) || MUTANT {",
        }],
        invariant: "each request is recorded once",
    },
    Mutant {
        name: "cut_response_gets_its_last_chunk",
        edits: &[Edit {
            file: "gateway/data-plane/src/downstream/h1.rs",
            from: "                response.flush().await?;\n                \
                   stream.socket().acknowledged().await;",
            to: "                if MUTANT {
                    ResponseSink::end(&mut response, None).await?;
                }
                response.flush().await?;\n                stream.socket().acknowledged().await;",
        }],
        invariant: "a complete response is whole",
    },
    Mutant {
        name: "cut_response_gets_the_end_of_its_stream",
        edits: &[Edit {
            file: "gateway/data-plane/src/downstream/h2.rs",
            from: "        Outcome::Cut => {\n            // RST_STREAM discards queued frames",
            to: "        Outcome::Cut => {
            if MUTANT {
                let _ = crate::http_message::ResponseSink::end(&mut response, None).await;
            }
            // RST_STREAM discards queued frames",
        }],
        invariant: "a complete response is whole",
    },
    Mutant {
        name: "memory_of_a_reset_stream_is_kept",
        edits: &[Edit {
            file: "shared/src/tunnel/endpoint/stream.rs",
            from: "        self.share.charge(self.charged as usize, 0);\n    }\n}",
            to: "        if !(MUTANT && self.sent_reset) {
            self.share.charge(self.charged as usize, 0);
        }\n    }\n}",
        }],
        invariant: "all memory is given back",
    },
    Mutant {
        name: "cut_upload_ends",
        edits: &[Edit {
            file: "gateway/data-plane/src/downstream/h1.rs",
            from: "                Ok(0) | Err(_) => return Poll::Ready(Err(BodyError::Gone)),",
            to: "                Ok(0) | Err(_) if MUTANT => return Poll::Ready(Ok(Part::End)),
                Ok(0) | Err(_) => return Poll::Ready(Err(BodyError::Gone)),",
        }],
        invariant: "interim responses and trailers pass",
    },
    Mutant {
        name: "closed_connection_keeps_the_slot_of_its_address",
        edits: &[Edit {
            file: "gateway/interface/src/rate_limit/arrivals.rs",
            from: "        let mut open = self.arrivals.open.borrow_mut();",
            to: "        if MUTANT {
            return;
        }
        let mut open = self.arrivals.open.borrow_mut();",
        }],
        invariant: "addresses have slots for open connections only",
    },
    Mutant {
        name: "buckets_are_full_after_a_takeover",
        edits: &[Edit {
            file: "gateway/interface/src/rate_limit/service_buckets.rs",
            from: "        let levels = self.levels(now);\n        self.location",
            to: "        let levels = if MUTANT {
            Vec::new()
        } else {
            self.levels(now)
        };
        self.location",
        }],
        invariant: "the bucket admits its burst and rate",
    },
    Mutant {
        name: "one_request_more_than_slots_is_sent",
        edits: &[
            Edit {
                file: "gateway/data-plane/src/tunnel/candidate.rs",
                from: "            .min(most)\n",
                to: "            .min(most)\n            + usize::from(MUTANT)\n",
            },
            Edit {
                file: "agent/src/forward/slots.rs",
                from: "if self.in_use() >= self.total {",
                to: "if self.in_use() >= self.total + u32::from(MUTANT) {",
            },
        ],
        invariant: "an agent serves no more requests than it has slots",
    },
    Mutant {
        name: "whole_response_is_called_cut",
        edits: &[Edit {
            file: "gateway/data-plane/src/relay/carry.rs",
            from: "Err(Stopped::Failed(_)) if response.is_whole() => {}",
            to: "Err(Stopped::Failed(_)) if response.is_whole() && !MUTANT => {}",
        }],
        invariant: "the record is true",
    },
    Mutant {
        name: "caller_that_ends_its_direction_is_gone",
        edits: &[
            Edit {
                file: "gateway/data-plane/src/downstream/h1.rs",
                from: "Ok(0) if self.switched => break,",
                to: "Ok(0) if self.switched && !MUTANT => break,",
            },
            Edit {
                file: "gateway/data-plane/src/relay/carry.rs",
                from: "            runtime::sleep(limits::LAST_BYTES).await;",
                to: "            if !MUTANT {
                runtime::sleep(limits::LAST_BYTES).await;
            }",
            },
        ],
        invariant: "without faults all requests succeed",
    },
    Mutant {
        name: "moved_request_is_sent_twice",
        edits: &[Edit {
            file: "gateway/data-plane/src/upstream/cross_node/request.rs",
            from: "        let mut sent = self.attempt(&successor, body.as_ref(), deadline).await;",
            to: "        if MUTANT {
            drop(self.attempt(&successor, body.as_ref(), deadline).await);
        }
        let mut sent = self.attempt(&successor, body.as_ref(), deadline).await;",
        }],
        invariant: "a POST is not doubled",
    },
    Mutant {
        name: "link_of_the_predecessor_is_refused",
        edits: &[Edit {
            file: "gateway/data-plane/src/worker/mod.rs",
            from: "                Ok(socket) => {
                    let upstream",
            to: "                Ok(socket) => {
                    if MUTANT {
                        return;
                    }
                    let upstream",
        }],
        invariant: "an error has a cause",
    },
    Mutant {
        name: "waiting_request_does_not_move",
        edits: &[Edit {
            file: "gateway/data-plane/src/tunnel/waiting.rs",
            from: "            if has_moved() {",
            to: "            if has_moved() && !MUTANT {",
        }],
        invariant: "a waiting request is opened once there is a tunnel",
    },
    Mutant {
        name: "waiting_upload_is_accepted",
        edits: &[Edit {
            file: "gateway/data-plane/src/relay/for_node.rs",
            from: "if origin.awaits_acceptance && request.is_opened() {",
            to: "if origin.awaits_acceptance && (request.is_opened() || MUTANT) {",
        }],
        invariant: "interim responses and trailers pass",
    },
];
