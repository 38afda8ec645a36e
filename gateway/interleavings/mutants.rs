//! Faults that the exploration must find.

/// A fault in one of the files.
pub(crate) struct Mutant {
    /// What the mutant does, as the name of a module.
    pub(crate) name: &'static str,
    /// The module that has the fault.
    pub(crate) module: &'static str,
    /// Text of its file that occurs once, and the text in its place.
    pub(crate) edits: &'static [(&'static str, &'static str)],
    /// The scenario of this module that fails.
    pub(crate) scenario: &'static str,
}

pub(crate) const MUTANTS: [Mutant; 20] = [
    Mutant {
        name: "receiver_looks_before_it_waits",
        module: "pipe",
        edits: &[(
            "self.shared.receiver.wait(cx);\n            received = self.try_receive();",
            "received = self.try_receive();\n            self.shared.receiver.wait(cx);",
        )],
        scenario: "a_dropped_sender_ends_the_wait",
    },
    Mutant {
        name: "sender_looks_before_it_waits",
        module: "pipe",
        edits: &[(
            "self.shared.sender.wait(cx);\n            let sent = self.try_send(&mut frame);",
            "let sent = self.try_send(&mut frame);\n            self.shared.sender.wait(cx);",
        )],
        scenario: "frames_that_wait_for_credit_arrive_in_order",
    },
    Mutant {
        name: "no_wait_for_the_end",
        module: "pipe",
        edits: &[(
            "self.shared.sender.wait(cx);\n            if self",
            "if self",
        )],
        scenario: "a_dropped_receiver_resolves_closed",
    },
    Mutant {
        name: "no_wake_if_bytes_are_in_flight",
        module: "pipe",
        edits: &[(
            "self.shared.wake(true);\n                Poll::Ready(Ok(()))",
            "if in_flight == 0 { self.shared.wake(true); }\n                Poll::Ready(Ok(()))",
        )],
        scenario: "frames_that_wait_for_credit_arrive_in_order",
    },
    Mutant {
        name: "no_wake_by_a_frame_without_bytes",
        module: "pipe",
        edits: &[(
            "self.shared.wake(false);\n                Poll::Ready(Ok(frame))",
            "if frame.bytes() > 0 { self.shared.wake(false); }\n                \
             Poll::Ready(Ok(frame))",
        )],
        scenario: "frames_that_wait_for_room_arrive_in_order",
    },
    Mutant {
        name: "wake_before_credit",
        module: "pipe",
        edits: &[(
            "self.shared\n                    .in_flight\n                    \
             .fetch_sub(frame.bytes(), Ordering::SeqCst);\n                \
             self.shared.wake(false);",
            "self.shared.wake(false);\n                \
             self.shared.in_flight.fetch_sub(frame.bytes(), Ordering::SeqCst);",
        )],
        scenario: "frames_that_wait_for_credit_arrive_in_order",
    },
    Mutant {
        name: "full_queue_keeps_the_credit",
        module: "pipe",
        edits: &[(
            "self.shared.in_flight.fetch_sub(bytes, Ordering::SeqCst);",
            "",
        )],
        scenario: "frames_that_wait_for_credit_arrive_in_order",
    },
    Mutant {
        name: "receiver_says_gone_after_the_wake",
        module: "pipe",
        edits: &[(
            "self.shared.receiver_gone.store(true, Ordering::SeqCst);\n        \
             self.shared.wake(false);",
            "self.shared.wake(false);\n        self.shared.receiver_gone.store(true, \
             Ordering::SeqCst);",
        )],
        scenario: "a_dropped_receiver_resolves_closed",
    },
    Mutant {
        name: "sender_closes_after_the_wake",
        module: "pipe",
        edits: &[(
            "self.queue = None;\n        self.shared.wake(true);",
            "self.shared.wake(true);\n        self.queue = None;",
        )],
        scenario: "a_dropped_sender_ends_the_wait",
    },
    Mutant {
        name: "full_mailbox_loses_the_wake",
        module: "pipe",
        edits: &[("end.waker.wake();", "")],
        scenario: "full_mailboxes_lose_no_wake",
    },
    Mutant {
        name: "flag_is_reset_after_the_wake",
        module: "pipe",
        edits: &[
            (
                "end.waiting.swap(false, Ordering::AcqRel)",
                "end.waiting.load(Ordering::SeqCst)",
            ),
            (
                "end.waker.wake();\n            }",
                "end.waker.wake();\n            }\n            end.waiting.swap(false, \
                 Ordering::AcqRel);",
            ),
        ],
        scenario: "frames_that_wait_for_credit_arrive_in_order",
    },
    Mutant {
        name: "no_wake_after_the_last_frame_of_a_turn",
        module: "pipe",
        edits: &[(
            "self.shared.receiver.wait(cx);\n            self.shared.wake(true);",
            "self.shared.receiver.wait(cx);",
        )],
        scenario: "frames_that_wait_for_room_arrive_in_order",
    },
    Mutant {
        name: "wake_without_memory_order",
        module: "pipe",
        edits: &[(
            "end.waiting.swap(false, Ordering::AcqRel)",
            "end.waiting.swap(false, Ordering::Relaxed)",
        )],
        scenario: "frames_that_wait_for_credit_arrive_in_order",
    },
    Mutant {
        name: "wait_that_does_not_see_the_last_wake",
        module: "pipe",
        edits: &[(
            "self.waiting.swap(true, Ordering::AcqRel)",
            "self.waiting.store(true, Ordering::Release)",
        )],
        scenario: "frames_that_wait_for_credit_arrive_in_order",
    },
    Mutant {
        name: "bell_is_reset_after_the_queue_was_read",
        module: "mailbox",
        edits: &[(
            "break 'mail;",
            "self.bell.rung.store(false, Ordering::Release); break 'mail;",
        )],
        scenario: "messages_of_two_threads_arrive_once",
    },
    Mutant {
        name: "bell_rings_before_the_message",
        module: "mailbox",
        edits: &[
            (
                "self.queue.try_send(message)",
                "self.bell.ring(); self.queue.try_send(message)",
            ),
            ("        })?;\n        self.bell.ring();", "        })?;"),
        ],
        scenario: "messages_of_two_threads_arrive_once",
    },
    Mutant {
        name: "worker_looks_before_it_registers",
        module: "mailbox",
        edits: &[
            ("self.waker.register(cx.waker());", ""),
            (
                "Poll::Ready(())\n            } else {",
                "Poll::Ready(())\n            } else {\n                \
                 self.waker.register(cx.waker());",
            ),
        ],
        scenario: "messages_of_two_threads_arrive_once",
    },
    Mutant {
        name: "bell_without_memory_order",
        module: "mailbox",
        edits: &[(
            "self.rung.swap(true, Ordering::AcqRel)",
            "self.rung.swap(true, Ordering::Relaxed)",
        )],
        scenario: "messages_of_two_threads_arrive_once",
    },
    Mutant {
        name: "worker_that_starts_again_waits_for_a_new_message",
        module: "mailbox",
        edits: &[("self.bell.rung.swap(true, Ordering::AcqRel);", "")],
        scenario: "a_worker_that_starts_again_handles_the_messages_left",
    },
    Mutant {
        name: "worker_that_starts_does_not_see_the_last_ring",
        module: "mailbox",
        edits: &[(
            "self.bell.rung.swap(true, Ordering::AcqRel);",
            "self.bell.rung.store(true, Ordering::Release);",
        )],
        scenario: "messages_of_two_threads_arrive_once",
    },
];
