"""The owner of a control channel whose tasks tolerate failures, without sums: all that it does is report and agree.

The sums and the state that a member gives another are nothing.
"""

from replicax._src.control.epoch_member import Await, Begin, EpochMember, Give, Send, Stop


class EpochOwner:
    """Carries out the actions of a real ``EpochMember``, in the thread that made the channel.

    Attributes:
      epochs: The epochs that it has begun, with their members.
      stop: The reason why it has stopped; None while it has not.
      steps: The steps that the program has made. The member may be one ahead, if another gave it the sums of that step.
    """

    def __init__(self, channel, number):
        self.channel, self.member = channel, EpochMember(number)
        self.epochs, self.stop, self.steps = [], None, 0
        channel.serve, channel.standing = self.serve, self.member

    def start(self, limit_s=60.0):
        """Enters the first epoch, with all tasks."""
        self._do(self.member.enter(0))
        self._until(lambda: self.member.may_step, limit_s)

    def enter(self, limit_s=60.0):
        """Waits in a newcomer until it may enter. The state is nothing."""
        self._do(self.member.enter(None))
        self._until(lambda: self.member.may_step or self.member.has_stopped, limit_s)
        self.steps = self.member.version

    def admit(self, limit_s=60.0):
        """Waits in the chief until a newcomer waits, and lets it enter."""
        self._until(lambda: self.member.waiting, limit_s)
        self._do(self.member.open())
        self._until(lambda: self.member.may_step, limit_s)

    def commit(self, limit_s=60.0):
        """Makes a step, in which nothing is added."""
        self._until(lambda: self.member.may_step, limit_s)
        if self.member.version == self.steps:
            self.member.commit()
        self.steps += 1

    def finish(self, limit_s=60.0):
        """Agrees with the others on the end."""
        self._do(self.member.finish())
        self._until(lambda: self.member.has_stopped, limit_s)

    def serve(self):
        while not self.channel.epoch_messages.empty():
            message = self.channel.epoch_messages.get()
            self._do(self.member.disconnect() if message is None else self.member.receive(message))

    def _until(self, is_true, limit_s):
        self.serve()
        while not is_true():
            assert self.channel.wait_for_message(limit_s), "no message has come"
            self.serve()

    def _do(self, actions):
        for action in actions:
            match action:
                case Send(message) if message["kind"] == "report":
                    self.channel.tell({**message, "address": "unused:1"})
                case Send(message):
                    self.channel.tell(message)
                case Begin():
                    self.epochs.append((action.epoch, action.members))
                case Stop():
                    self.stop = action.reason
                case Give():
                    pass
                case Await():
                    self._do(self.member.catch_up())
