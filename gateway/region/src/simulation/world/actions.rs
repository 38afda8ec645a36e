//! Actions of a host: those of its machine, and the requests of its callers.

use super::*;

impl World {
    /// Runs the actions of a host.
    pub(in super::super) fn drive(&mut self, host: usize) {
        let clock = self.clock(host);
        while let Some(process) = &mut self.hosts[host].process
            && let Some(action) = process.machine.poll(clock)
        {
            let number = process.number;
            let slot = process.machine.slot();
            self.hosts[host].slot = slot.or(self.hosts[host].slot);
            self.act(host, number, action);
        }
        let Some(process) = &mut self.hosts[host].process else {
            return;
        };
        process.admit_until = process.machine.admit_until();
        let number = process.number;
        if process.machine.state() == Some(NodeState::Draining) && !process.is_handing_over {
            process.is_handing_over = true;
            let at = self.now + self.random.millis(20, 800);
            self.push(
                at,
                Work::Input {
                    host,
                    process: number,
                    event: MembershipEvent::HandedOver,
                },
            );
        }
        if let Some(deadline) = self.hosts[host]
            .process
            .as_ref()
            .and_then(|process| process.machine.next_deadline())
        {
            let at = self
                .true_time(host, deadline)
                .max(self.now + Duration::from_micros(10));
            if self.hosts[host].wake.is_none_or(|wake| at < wake) {
                self.hosts[host].wake = Some(at);
                self.push(at, Work::Wake { host, at });
            }
        }
        self.check_admission(host);
    }

    fn act(&mut self, host: usize, process: u64, action: MembershipAction) {
        match action {
            MembershipAction::Call(call) => {
                self.calls += 1;
                let now = self.now;
                if let Some(process) = self.process(host, process) {
                    process.called = now;
                }
                let at = self.now + self.engine_delay(host);
                let generation = self.generation(host);
                if self.loses() {
                    return self.lose_call(host);
                }
                self.push(
                    at,
                    Work::Execute {
                        host,
                        process,
                        generation,
                        call,
                    },
                );
            }
            MembershipAction::Publish(view) => {
                self.note(|| format!("host {host} publishes {view:?}"));
                self.certify(host);
                let delay = self.random.millis(0, 20);
                let now = self.now;
                let Some(process) = self.process(host, process) else {
                    return;
                };
                process.apply_at = (now + delay).max(process.apply_at + Duration::from_micros(1));
                let at = process.apply_at;
                let number = process.number;
                self.push(
                    at,
                    Work::Applied {
                        host,
                        process: number,
                        view,
                    },
                );
            }
            MembershipAction::Tell(state) => {
                self.tell(host, &state);
            }
            MembershipAction::Stop(reason) => {
                self.note(|| format!("host {host} stops: {reason:?}"));
                self.hosts[host].process = None;
            }
        }
    }

    /// Sends a message of a host to all others.
    fn tell(&mut self, host: usize, state: &NodeMessage) {
        for to in (0..self.hosts.len()).filter(|to| *to != host) {
            if self.links_cut[host][to] || self.loses() {
                self.peers_disturbed = true;
                continue;
            }
            let at = self.now + self.peer_delay();
            let peer = self.hosts[to]
                .process
                .as_ref()
                .map(|process| process.machine.session());
            if let Some(shown) = peer.and_then(|peer| self.shown_to(host, peer)) {
                self.push(
                    at,
                    Work::Deliver {
                        to,
                        from: host,
                        shown,
                        state: state.clone(),
                    },
                );
            }
        }
    }

    pub(super) fn request(&mut self, host: usize, mut request: SimulatedRequest) {
        let service = self.services[request.service].clone();
        let Some(process) = &self.hosts[host].process else {
            return;
        };
        request.process = process.number;
        let Some(view) = process.view.clone() else {
            return;
        };
        match view.decide(&service, ArrivedFrom::Caller, true) {
            Decision::Forward(member) => {
                request.forwards += 1;
                request.epoch = view.epoch();
                if request.forwards > 1 + u32::from(OwnerAttempts::RETRIES_MAX) {
                    return self.fail(&format!(
                        "a request was forwarded {} times",
                        request.forwards
                    ));
                }
                let at = self.now + self.peer_delay();
                self.push(
                    at,
                    Work::Forwarded {
                        to: member.session,
                        request,
                    },
                );
            }
            Decision::NotOwner { .. } => self.fail("the ingress answers as a peer"),
            Decision::Admit | Decision::Wait => self.answered += 1,
        }
    }

    pub(super) fn forwarded(&mut self, host: usize, mut request: SimulatedRequest) {
        let service = &self.services[request.service];
        let Some(view) = self.hosts[host]
            .process
            .as_ref()
            .and_then(|process| process.view.as_ref())
        else {
            return;
        };
        match view.decide(service, ArrivedFrom::Node, true) {
            Decision::Forward(_) => self.fail("a forwarded request is forwarded again"),
            Decision::Admit | Decision::Wait => self.answered += 1,
            Decision::NotOwner { epoch } => {
                let ingress = request.ingress;
                let process = request.process;
                match request.attempts.not_owner(request.epoch, epoch) {
                    Retry::GiveUp => return,
                    Retry::AfterEpoch(epoch) => {
                        let event = MembershipEvent::Hint { epoch };
                        self.push(
                            self.now,
                            Work::Input {
                                host: ingress,
                                process,
                                event,
                            },
                        );
                    }
                    Retry::AfterPause => {}
                }
                self.push(
                    self.now + Duration::from_millis(100),
                    Work::Request(request),
                );
            }
        }
    }
}
